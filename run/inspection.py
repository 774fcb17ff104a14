"""`shoal checkpoint inspect`: what a checkpoint folder holds, and whether that is what its configuration asks for."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kernels.audit import Form, audit, forms, lines
from kernels.config import LayerRole, ModelConfig
from kernels.shards import CheckpointError, Problem, Shards, read_shards
from kernels.tensors import VALUE_BYTES, model_tensors
from run.status import PIPE_COLUMNS

PARTS = ("backbone", "Engram tables", "drafts", "vision")


@dataclass
class Share:
    """What the tensors of one part and role come to; without headers, as they are published."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: set[str] = field(default_factory=set)


@dataclass
class Inspection:
    """A folder's configuration and files, and what is wrong with them. Raises ConfigError.

    `of` reads headers; `read_values` the values too, if there is nothing wrong so far.
    """

    config: ModelConfig
    shards: Shards
    problems: list[Problem]
    shares: dict[tuple[str, str], Share]
    has_read_values: bool = False

    @classmethod
    def of(cls, folder: Path) -> Inspection:
        config = ModelConfig.from_folder(folder)
        shards = read_shards(folder)
        shares: dict[tuple[str, str], Share] = {}
        for form in forms(config, shards):
            _add(form, shards, shares.setdefault((form.tensor.part, form.tensor.role), Share()))
        ordered = dict(sorted(shares.items(), key=lambda item: PARTS.index(item[0][0])))
        return cls(config, shards, audit(config, shards), ordered)

    def read_values(self, folder: Path, console: Console) -> None:
        """Add a problem for each tensor with a value that is not a number; a bar on `console` shows how far it is."""
        if self.problems:
            return
        from kernels.checkpoint import Checkpoint  # torch

        try:
            checkpoint = Checkpoint(folder)
        except CheckpointError as error:
            self.problems.append(Problem(self.shards.path, _less(self.shards.path, error)))
            return
        columns = (TextColumn("values"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            entries = sorted(self.shards.entries.items(), key=lambda item: (item[1].path, item[1].offset))
            task = progress.add_task("", total=sum(entry.num_bytes for _, entry in entries))
            for name, entry in entries:
                try:
                    checkpoint.check(name, partial(progress.advance, task))
                except CheckpointError as error:
                    self.problems.append(Problem(entry.path, _less(entry.path, error)))
        self.has_read_values = True

    @property
    def checked(self) -> str:
        """What the answer rests on."""
        if self.shards.entries:
            return "names, shapes, types" + (", values" if self.has_read_values else "")
        return "names" if self.shards.files else "nothing"

    @property
    def left_out(self) -> list[str]:
        """Parts that the configuration has and the files have not: a model can do without them."""
        asked, there = {tensor.part for tensor in model_tensors(self.config)}, {part for part, _ in self.shares}
        return [part for part in PARTS if part in asked and part not in there]

    @property
    def total(self) -> Share:
        total = Share()
        for share in self.shares.values():
            total.tensors += share.tensors
            total.parameters += share.parameters
            total.bytes += share.bytes
        return total

    def as_json(self) -> str:
        total, shards = self.total, self.shards
        return json.dumps(
            {
                "checked": self.checked,
                "files": len(set(shards.files.values())),
                "tensors": len(shards.files),
                "expected_tensors": total.tensors,
                "parameters": total.parameters,
                "bytes": total.bytes,
                "claimed_bytes": shards.total_bytes,
                "left_out": self.left_out,
                "roles": [
                    {"part": part, "role": role, **vars(share), "dtypes": sorted(share.dtypes)}
                    for (part, role), share in self.shares.items()
                ],
                "layers": [_describe(layer) for layer in (*self.config.layers, *self.config.draft_stages)],
                "problems": [{"file": str(problem.path), "what": problem.what} for problem in self.problems],
            }
        )


def print_inspection(folder: Path, *, values: bool, as_json: bool) -> int:
    """Print it; status 1 when anything is wrong. Raises ConfigError."""
    found = Inspection.of(folder)
    if values:
        found.read_values(folder, Console(stderr=True))
    if as_json:
        print(found.as_json())
        return 1 if found.problems else 0
    shards, total = found.shards, found.total
    num_files = len(set(shards.files.values()))
    print(f"{shards.path}: {len(shards.files):,} tensors in {num_files} file{'s' if num_files != 1 else ''}")
    if not shards.entries:
        why = "names only, as none of the files is there" if shards.files else "nothing"
        print(f"Checked: {why}. Sizes and types below are those published.")
    _print_config(found.config)
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(_table(found))
    if shards.total_bytes not in (None, total.bytes):
        print(f"The index says {shards.total_bytes:,} bytes in all.")
    for part in found.left_out:
        print(f"Left out: {part}, of which config.json speaks.")
    for line in lines(found.problems):
        print(line)
    if not found.has_read_values:
        print("Values were not read" + (", for what is wrong without them." if values else ": give --values."))
    no_problem = "No problem found, in values either." if found.has_read_values else "No problem found."
    print(f"Problems: {len(found.problems):,}" if found.problems else no_problem)
    return 1 if found.problems else 0


def _less(path: Path, error: CheckpointError) -> str:
    """An error without the file it names first."""
    return str(error).removeprefix(f"{path}: ")


def _add(form: Form, shards: Shards, share: Share) -> None:
    share.parameters += form.tensor.num_values
    for want in form.stored:
        entry = shards.entries.get(want.name)
        dtype = entry.dtype if entry else want.dtypes[0]
        share.tensors += 1
        share.bytes += entry.num_bytes if entry else prod(want.shape) * VALUE_BYTES[dtype]
        share.dtypes.add(dtype)


def _print_config(config: ModelConfig) -> None:
    print(
        f"vocabulary {config.vocab_size:,}, hidden {config.hidden_size:,}, layers {config.num_hidden_layers},"
        f" experts {config.n_routed_experts} ({config.num_experts_per_tok} per token),"
        f" window {config.sliding_window}, context {config.max_position_embeddings:,}"
    )
    layers = (*config.layers, *config.draft_stages)
    for what, group in groupby(layers, key=lambda layer: _describe(layer).split(": ", 1)[1]):
        numbers = [layer.layer for layer in group]
        one = len(numbers) == 1
        print(f"layer {numbers[0]}: {what}" if one else f"layers {numbers[0]}-{numbers[-1]}: {what}")


def _describe(layer: LayerRole) -> str:
    owners = "" if layer.ratio == 0 else f", KV of layer {layer.kv_owner}, index of layer {layer.index_owner}"
    engram = "" if layer.engram is None else ", Engram"
    return f"layer {layer.layer}: {layer.mode}, ratio {layer.ratio}{owners}{engram}"


def _table(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("part", "role", "tensors", "parameters", "bytes", "types"):
        table.add_column(header, justify="right" if header in ("tensors", "parameters", "bytes") else "left")
    total = found.total
    rows = [(part, role, share) for (part, role), share in found.shares.items()]
    for part, role, share in [*rows, ("all", "", total)]:
        counts = [f"{count:,}" for count in (share.tensors, share.parameters, share.bytes)]
        table.add_row(part, role, *counts, " ".join(sorted(share.dtypes)))
    return table
