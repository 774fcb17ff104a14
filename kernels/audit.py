"""Whether a checkpoint's files hold what its configuration asks for: all of it, no more, in the right form."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from reprlib import repr as short
from typing import NamedTuple

from kernels.config import ModelConfig
from kernels.shards import CheckpointError, Entry, Problem, Shards
from kernels.tensors import (
    DTYPES,
    PLAIN,
    VALUE_BYTES,
    Format,
    Stored,
    Tensor,
    model_tensors,
    scale_name,
    stored,
)

# A checkpoint may come without these, whatever its configuration says; but not with half of one.
_OPTIONAL = ("drafts", "vision")
_MAX_LISTED = 20


class Form(NamedTuple):
    """A tensor that should be there and the type of its values: as the header says, else as can be told by names."""

    tensor: Tensor
    dtype: str

    @property
    def allowed(self) -> bool:
        return self.dtype in DTYPES[self.tensor.format]

    @property
    def stored(self) -> tuple[Stored, ...]:
        """What its files should hold; as published when it is of a type it cannot have."""
        return stored(self.tensor, self.dtype if self.allowed else DTYPES[self.tensor.format][0])


def forms(config: ModelConfig, shards: Shards) -> tuple[Form, ...]:
    """All tensors that `config` asks for, less the parts that `shards` leaves out altogether."""
    tensors = model_tensors(config)
    there = {tensor.part for tensor in tensors if tensor.name in shards.files}
    scaled = {tensor.format for tensor in tensors if not shards.files or scale_name(tensor.name) in shards.files}
    scaled.add("table")
    found = []
    for tensor in tensors:
        if tensor.part in there or tensor.part not in _OPTIONAL or not shards.files:
            entry, dtypes = shards.entries.get(tensor.name), DTYPES[tensor.format]
            # Without a header a tensor is quantised if any of its kind is.
            found.append(Form(tensor, entry.dtype if entry else dtypes[0] if tensor.format in scaled else "BF16"))
    return tuple(found)


def audit(config: ModelConfig, shards: Shards) -> list[Problem]:
    """Everything that is wrong, each with its file; empty when the checkpoint can be loaded.

    Where no header is known, as for an index without its files, only names are checked.
    """
    problems = list(shards.problems)
    if not shards.files:
        return problems or [Problem(shards.path, "no tensor is in it")]
    known: set[str] = set()
    asked = forms(config, shards)
    for form in asked:
        known |= {want.name for want in form.stored}
        if form.allowed:
            for want in form.stored:
                problems += _compare(want, shards)
        else:
            want = form.stored[0]
            what = f"{want.name} is {form.dtype}, expected {' or '.join(want.dtypes)}"
            problems.append(Problem(shards.files[want.name], what))
    problems += _mixed([form.tensor for form in asked], shards)
    for name, path in shards.files.items():
        if name not in known:
            problems.append(Problem(path, f"{name} is not a tensor of this model"))
    return problems


def refuse(problems: Sequence[Problem]) -> None:
    """Raises CheckpointError with all of `problems`, the first twenty in full, unless there are none."""
    if problems:
        raise CheckpointError("\n".join(lines(problems)))


def lines(problems: Sequence[Problem]) -> list[str]:
    """The first twenty of `problems` in words, and how many more there are."""
    listed = [str(problem) for problem in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        listed.append(f"and {len(problems) - _MAX_LISTED:,} more")
    return listed


def _compare(want: Stored, shards: Shards) -> list[Problem]:
    if want.name not in shards.files:
        return [Problem(shards.path, f"{want.name} is missing")]
    entry = shards.entries.get(want.name)
    if entry is None:
        return []
    if entry.dtype not in want.dtypes:
        return [Problem(entry.path, f"{want.name} is {entry.dtype}, expected {' or '.join(want.dtypes)}")]
    if entry.shape != want.shape:
        return [Problem(entry.path, f"{want.name} has shape {short(list(entry.shape))}, expected {list(want.shape)}")]
    return _sized(want.name, entry)


def _sized(name: str, entry: Entry) -> list[Problem]:
    num_bytes = prod(entry.shape) * VALUE_BYTES[entry.dtype]
    if entry.num_bytes == num_bytes:
        return []
    return [Problem(entry.path, f"{name} takes {entry.num_bytes:,} bytes, its shape and type {num_bytes:,}")]


def _mixed(tensors: Sequence[Tensor], shards: Shards) -> list[Problem]:
    """A layer's matrices are all quantised or none is, as they share inputs, which are quantised with them."""
    first: dict[tuple[str, Format], tuple[str, Entry]] = {}
    problems = []
    for tensor in tensors:
        entry = shards.entries.get(tensor.name)
        # The input of wo_a is left alone either way (spec §3).
        if entry is None or tensor.format not in ("fp8", "fp4") or tensor.name.endswith("wo_a.weight"):
            continue
        layer = ".".join(tensor.name.split(".")[:2])
        name, other = first.setdefault((layer, tensor.format), (tensor.name, entry))
        if (entry.dtype in PLAIN) != (other.dtype in PLAIN):
            problems.append(Problem(entry.path, f"{tensor.name} is {entry.dtype}, but {name} is {other.dtype}"))
    return problems
