"""The files of a checkpoint folder and what their headers say; no values are read (spec §1.3)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
        content = json.loads(index.read_bytes())
        weight_map: dict[str, str] = content["weight_map"]
        paths = {file: index.parent / _plain(file) for file in sorted(set(weight_map.values()))}
        shards.files = {name: paths[file] for name, file in weight_map.items()}
        shards.total_bytes = (content.get("metadata") or {}).get("total_size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shards.problems.append(Problem(index, f"no weight_map of names to files: {error!r}"))
        return shards
    shards.index_only = bool(paths) and not any(path.exists() for path in paths.values())
    if not shards.index_only:
        _join({path: _entries(path, shards.problems) for path in paths.values()}, shards)
    return shards


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
    entries: dict[str, Entry] = {}
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes:,} bytes in a file of {num_bytes:,}")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop:
                raise ValueError(f"{name} lies at {start} to {stop}")
            entries[name] = Entry(path, entry["dtype"], tuple(entry["shape"]), stop - start, 8 + header_bytes + start)
    except FileNotFoundError:
        problems.append(Problem(path, "not found"))
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(Problem(path, f"not a safetensors file: {error}"))
        return None
    ends = sorted((entry.offset + entry.num_bytes, name) for name, entry in entries.items())
    cut = next((name for end, name in ends if end > num_bytes), None)
    if cut is not None:
        missing = ends[-1][0] - num_bytes
        problems.append(Problem(path, f"truncated: {missing:,} bytes are missing, from {cut} on"))
        return None
    return entries


def _plain(file: str) -> str:
    """A file of the folder itself: an index does not send us elsewhere."""
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file in the folder")
    return file
