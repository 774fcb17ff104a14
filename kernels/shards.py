"""The files of a checkpoint folder and what their headers say; no values are read (spec §1.3)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from kernels.keys import parse

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class CheckpointError(ValueError):
    """A file or tensor of the checkpoint is missing, unreadable or not what it should be; the message names both."""


class Entry(NamedTuple):
    """One tensor in a file: `dtype` in safetensors' words, `shape` and size as stored, its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int


class Problem(NamedTuple):
    """What is wrong with a file, or with a tensor in it."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass
class Shards:
    """`files`: tensor name -> file, by the index or the single file; `entries`: those tensors as headers describe them.

    `path` is the index or the single file. `index_only`: none of an index's files is there, so names are all that is
    known. `total_bytes` is what the index claims, if it does.
    """

    path: Path
    files: dict[str, Path] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    index_only: bool = False
    total_bytes: int | None = None

    def need_files(self) -> None:
        """Raises CheckpointError when there are names only: nothing can be loaded."""
        if self.index_only:
            raise CheckpointError(f"{self.path}: none of its files is there")


def read_shards(folder: str | Path) -> Shards:
    """The index, if there is one, and every header. What cannot be read or does not agree becomes a problem."""
    index = Path(folder) / INDEX
    if not index.exists():
        shards = Shards(Path(folder) / SINGLE)
        shards.entries = _entries(shards.path, shards.problems) or {}
        shards.files = dict.fromkeys(shards.entries, shards.path)
        return shards
    shards = Shards(index)
    try:
        _read_index(index, shards)
    except (OSError, ValueError) as error:
        shards.problems.append(Problem(index, str(error)))
        return shards
    paths = set(shards.files.values())
    shards.index_only = bool(paths) and not any(map(os.path.exists, paths))
    if not shards.index_only:
        _join({path: _entries(path, shards.problems) for path in sorted(paths)}, shards)
    return shards


def _read_index(index: Path, shards: Shards) -> None:
    """Take over what the index says. Raises OSError, and ValueError that names the key."""
    try:
        content = parse(index.read_bytes())
    except ValueError as error:
        raise ValueError(f"no weight_map of names to files: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError("no weight_map of names to files")
    for name, file in weight_map.items():
        _need_name(name)
        # A file of the folder itself: an index does not send us elsewhere.
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file or not file.isprintable():
            what = f"{short(file)} is not the name of a file in the folder"
            raise ValueError(f"no weight_map of names to files: {name}: {what}")
    metadata = content.get("metadata")
    if not isinstance(metadata, dict | None):
        raise ValueError("metadata is not an object")
    total = (metadata or {}).get("total_size")
    if total is not None and not _is_size(total):
        raise ValueError(f"metadata.total_size {short(total)} is not a number of bytes")
    paths = {file: index.parent / file for file in set(weight_map.values())}
    shards.files = {name: paths[file] for name, file in weight_map.items()}
    shards.total_bytes = total


def _join(headers: dict[Path, dict[str, Entry] | None], shards: Shards) -> None:
    """Take over what the headers say, where the index agrees; a header that could not be read is None."""
    for path, entries in headers.items():
        for name, entry in (entries or {}).items():
            listed = shards.files.get(name)
            if listed == path:
                shards.entries[name] = entry
            else:
                where = "does not list it" if listed is None else f"puts it into {listed.name}"
                shards.problems.append(Problem(path, f"{name} is here, but the index {where}"))
    for name, path in shards.files.items():
        found = headers[path]
        if found is not None and name not in found:
            shards.problems.append(Problem(path, f"{name} is not here, though the index says so"))


def _entries(path: Path, problems: list[Problem]) -> dict[str, Entry] | None:
    """The tensors of a safetensors file: eight bytes of length, a JSON header, then the values without gaps."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes:,} bytes in a file of {num_bytes:,}")
            header = parse(file.read(header_bytes))
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        header.pop("__metadata__", None)
        first = 8 + header_bytes
        entries = {name: _entry(path, name, keys, first) for name, keys in header.items()}
        last, end = _end_of_row(entries, first)
        if end < num_bytes:
            raise ValueError(f"{num_bytes - end:,} bytes follow {last}")
    except FileNotFoundError:
        problems.append(Problem(path, "not found"))
        return None
    except (OSError, ValueError) as error:
        problems.append(Problem(path, f"not a safetensors file: {error}"))
        return None
    if end > num_bytes:
        beyond = [(one.offset, name) for name, one in entries.items() if one.offset + one.num_bytes > num_bytes]
        _, cut = min(beyond)
        problems.append(Problem(path, f"truncated: {end - num_bytes:,} bytes are missing, from {cut} on"))
        return None
    return entries


def _entry(path: Path, name: str, keys: Any, first: int) -> Entry:
    """One tensor of a header; `first` is where the values of the file begin. Raises ValueError."""
    _need_name(name)
    if not isinstance(keys, dict) or not {"dtype", "shape", "data_offsets"} <= set(keys):
        raise ValueError(f"{name}: dtype, shape and data_offsets are not given")
    dtype, shape, offsets = keys["dtype"], keys["shape"], keys["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"{name}: dtype {short(dtype)} is not a name")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise ValueError(f"{name}: shape {short(shape)} is not a list of sizes")
    is_pair = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))
    if not is_pair or offsets[0] > offsets[1]:
        raise ValueError(f"{name}: data_offsets {short(offsets)} are not a start and an end")
    start, stop = offsets
    return Entry(path, dtype, tuple(shape), stop - start, first + start)


def _end_of_row(entries: dict[str, Entry], first: int) -> tuple[str, int]:
    """The last tensor and where it ends: they lie one behind another. Raises ValueError for gaps and overlaps."""
    last, end = "the header", first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            raise ValueError(f"{name} begins at byte {entry.offset - first} of the values, expected at {end - first}")
        last, end = f"the last tensor, {name}", end + entry.num_bytes
    return last, end


def _need_name(name: str) -> None:
    """Raises ValueError for a tensor's name that would not read as what it is on a terminal."""
    if not name.isprintable():
        raise ValueError(f"{short(name)} is not a name")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
