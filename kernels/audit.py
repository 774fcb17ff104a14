"""Whether a checkpoint's files hold what its configuration asks for: no more, no less, in the right types and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from kernels.config import ModelConfig
from kernels.shards import CheckpointError, Entry, Problem, Shards
from kernels.tensors import DTYPES, PLAIN, Format, Stored, Tensor, model_tensors, scale_name, stored

# A checkpoint may come without these, whatever its configuration says; but not with half of one.
_OPTIONAL = ("drafts", "vision")
_VALUE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BF16": 2, "F32": 4}
_MAX_LISTED = 20


def present(config: ModelConfig, shards: Shards) -> tuple[Tensor, ...]:
    """The tensors that `config` asks for, less the parts that `shards` leaves out altogether."""
    tensors = model_tensors(config)
    there = {tensor.part for tensor in tensors if tensor.name in shards.files}
    return tuple(tensor for tensor in tensors if tensor.part in there or tensor.part not in _OPTIONAL)


def audit(config: ModelConfig, shards: Shards) -> list[Problem]:
    """Everything that is wrong, each with its file; empty when the checkpoint can be loaded.

    Where no header is known, for an index without its files, only names are checked.
    """
    problems = list(shards.problems)
    if not shards.files:
        return problems
    tensors = present(config, shards)
    scaled = {tensor.format for tensor in tensors if scale_name(tensor.name) in shards.files}
    known: set[str] = set()
    for tensor in tensors:
        entry = shards.entries.get(tensor.name)
        dtypes = DTYPES[tensor.format]
        # Without a header: quantised if any of its kind is.
        dtype = entry.dtype if entry else dtypes[0] if tensor.format in scaled else dtypes[-1]
        if dtype not in dtypes:
            assert entry is not None
            problems.append(Problem(entry.path, f"{tensor.name} is {dtype}, expected {' or '.join(dtypes)}"))
            known |= {tensor.name, scale_name(tensor.name)}
            continue
        for want in stored(tensor, dtype):
            known.add(want.name)
            problems += _compare(want, shards)
    problems += _mixed(tensors, shards)
    for name, path in shards.files.items():
        if name not in known:
            problems.append(Problem(path, f"{name} is not a tensor of this model"))
    return problems


def refuse(problems: Sequence[Problem]) -> None:
    """Raises CheckpointError with what there is in `problems`, the first twenty in full; returns when there is nothing."""
    if not problems:
        return
    lines = [str(problem) for problem in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        lines.append(f"and {len(problems) - _MAX_LISTED:,} more")
    raise CheckpointError("\n".join(lines))


def _compare(want: Stored, shards: Shards) -> list[Problem]:
    if want.name not in shards.files:
        return [Problem(shards.path, f"{want.name} is missing")]
    entry = shards.entries.get(want.name)
    if entry is None:
        return []
    if entry.dtype not in want.dtypes:
        return [Problem(entry.path, f"{want.name} is {entry.dtype}, expected {' or '.join(want.dtypes)}")]
    if entry.shape != want.shape:
        return [Problem(entry.path, f"{want.name} has shape {list(entry.shape)}, expected {list(want.shape)}")]
    return _sized(want.name, entry)


def _sized(name: str, entry: Entry) -> list[Problem]:
    num_bytes = prod(entry.shape) * _VALUE_BYTES[entry.dtype]
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
