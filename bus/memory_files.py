"""Files in memory: the same rules as a folder, without threads or a disk, and the faults of one on demand."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from bus.files import Buffer, FileInfo

T = TypeVar("T")
Operation = Literal["list", "create", "read", "write", "rename", "remove"]


class Hold:
    """An operation that waits. `is_reached`: it has begun."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self.is_released = asyncio.Event()


class MemoryFolder:
    """The disk that the `MemoryFiles` of one simulation share, with room for files of `max_bytes` in all."""

    def __init__(self, max_bytes: float = float("inf")) -> None:
        self.files: dict[str, bytearray] = {}
        self.max_bytes = max_bytes


class MemoryFiles:
    """One process's way to a `MemoryFolder` (its own, if none is given).

    What fails or is held in the middle of a write has written the first half of its bytes: the worst case.
    """

    def __init__(self, folder: MemoryFolder | None = None) -> None:
        self.folder = folder or MemoryFolder()
        self._errors: list[tuple[OSError, Operation | None]] = []
        self._holds: list[tuple[Hold, Operation | None]] = []
        self._is_cut = False

    # Faults

    def fail_next(self, error: OSError, operation: Operation | None = None) -> None:
        """The next operation (of this kind) raises `error`."""
        self._errors.append((error, operation))

    def hold_next(self, operation: Operation | None = None) -> Hold:
        """The next operation (of this kind) does not go on until it is released."""
        hold = Hold()
        self._holds.append((hold, operation))
        return hold

    def heal(self) -> None:
        """Nothing that was asked for is to fail, or to be held, any more."""
        self._errors.clear()
        self._holds.clear()

    def cut(self) -> None:
        """Die without a word: nothing this one does reaches the folder any more. Its operations never end."""
        self._is_cut = True

    def flip(self, name: str, offset: int) -> None:
        """Damage one byte."""
        self.folder.files[name][offset] ^= 0xFF

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut the end of a file off."""
        del self.folder.files[name][size_bytes:]

    def vanish(self, name: str | None = None) -> None:
        """Lose a file, or all."""
        if name is None:
            self.folder.files.clear()
        else:
            del self.folder.files[name]

    # Files

    async def list(self) -> list[FileInfo]:
        """See `Files.list`."""
        await self._turn("list")
        return sorted(FileInfo(name, len(data)) for name, data in self.folder.files.items())

    async def create(self, name: str, size_bytes: int) -> None:
        """See `Files.create`."""
        await self._turn("create")
        if name in self.folder.files:
            raise FileExistsError(errno.EEXIST, "it exists", name)
        if sum(map(len, self.folder.files.values())) + size_bytes > self.folder.max_bytes:
            raise OSError(errno.ENOSPC, "no space left", name)
        self.folder.files[name] = bytearray(size_bytes)

    async def read(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """See `Files.read`."""
        await self._turn("read")
        data = memoryview(self._find(name))
        return [bytes(data[offset : offset + size]) for offset, size in spans]

    async def write(self, name: str, parts: Iterable[tuple[int, Buffer]]) -> None:
        """See `Files.write`."""
        parts = list(parts)
        num_bytes = sum(len(part) for _, part in parts)
        file = self._find(name)
        if not self._is_cut:
            _put(file, parts, 0, num_bytes // 2)
        await self._turn("write")
        _put(file, parts, num_bytes // 2, num_bytes)
        if self.folder.files.get(name) is not file:
            raise FileNotFoundError(errno.ENOENT, "removed while it was open", name)

    async def rename(self, name: str, new_name: str) -> None:
        """See `Files.rename`."""
        await self._turn("rename")
        self._find(name)
        self.folder.files[new_name] = self.folder.files.pop(name)

    async def remove(self, name: str) -> None:
        """See `Files.remove`."""
        await self._turn("remove")
        self._find(name)
        del self.folder.files[name]

    async def close(self) -> None:
        """See `Files.close`."""

    # Inside

    async def _turn(self, operation: Operation) -> None:
        await asyncio.sleep(0)
        if (hold := _take(self._holds, operation)) is not None:
            hold.is_reached.set()
            await hold.is_released.wait()
        if self._is_cut:
            await asyncio.Event().wait()
        if (error := _take(self._errors, operation)) is not None:
            raise error

    def _find(self, name: str) -> bytearray:
        if name not in self.folder.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self.folder.files[name]


def _take(waiting: list[tuple[T, Operation | None]], operation: Operation) -> T | None:
    """The first of those that wait for this operation, which waits no longer."""
    for number, (item, wanted) in enumerate(waiting):
        if wanted in (None, operation):
            del waiting[number]
            return item
    return None


def _put(file: bytearray, parts: Sequence[tuple[int, Buffer]], first: int, last: int) -> None:
    """Write those bytes of `parts` that are, counted through all, from `first` to before `last`."""
    at = 0
    for offset, data in parts:
        piece = data[max(first - at, 0) : max(last - at, 0)]
        start = offset + max(first - at, 0)
        if piece:
            file.extend(bytes(max(start - len(file), 0)))
            file[start : start + len(piece)] = piece
        at += len(data)
