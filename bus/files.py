"""A folder of files that are written in place: where blocks are stored. A seam, like the bus and bulk."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

NUM_THREADS = 4
MAX_OPEN = 128
"""Files kept open. Opening one costs less than reading a block, but not on every shared folder."""

MAX_TRIP_PARTS = 256
"""Buffers in one system call; POSIX promises no more than 16, Linux 1,024."""

_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class FileInfo(NamedTuple):
    """One file of the folder."""

    name: str
    size_bytes: int


class Files(Protocol):
    """Nothing here blocks the loop. Every method raises the OSError that the folder gives.

    The folder may be shared by many machines, and vanish, with all in it, at any time.
    """

    async def list(self) -> list[FileInfo]:
        """All files, sorted by name; none when there is no folder."""
        ...

    async def create(self, name: str, size_bytes: int) -> None:
        """A new file of zeros with its room on the disk reserved, in a folder that is made if need be.

        Raises FileExistsError; on any error there is no such new file.
        """
        ...

    async def read(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """The bytes of these (offset, size) in one go; less of what reaches beyond the end."""
        ...

    async def write(self, name: str, parts: Iterable[tuple[int, Buffer]]) -> None:
        """Write these (offset, bytes) within the file; done when readers see them. The last part is written last.
        `parts` is gone through beside the loop: what takes long to make may be made there.

        Raises FileNotFoundError when nobody could find the file any more, whoever still has it open. Cancelled, it may
        be written all the same.
        """
        ...

    async def rename(self, name: str, new_name: str) -> None:
        """Atomic: of two who try, one gets FileNotFoundError."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a file."""
        ...

    async def close(self) -> None:
        """Let go of what is open. Idempotent."""
        ...


class PosixFiles:
    """A folder of the operating system, on threads of its own: one trip to a thread for each call, whatever it holds.

    Nothing is synced: what a machine that fails had not written is missing afterwards, as if it had never been stored.
    Folder and files are for the user alone who makes them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = _OpenFiles(folder)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="files")

    async def list(self) -> list[FileInfo]:
        """See `Files.list`."""
        return await self._beside(lambda: _scan(self.folder))

    async def create(self, name: str, size_bytes: int) -> None:
        """See `Files.create`."""
        await self._beside(lambda: self._create(self._open.path(name), size_bytes))

    async def read(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """See `Files.read`."""
        return await self._beside(lambda: self._read(name, spans))

    async def write(self, name: str, parts: Iterable[tuple[int, Buffer]]) -> None:
        """See `Files.write`."""
        await self._beside(lambda: self._write(name, list(parts)))

    async def rename(self, name: str, new_name: str) -> None:
        """See `Files.rename`."""
        await self._beside(lambda: self._rename(name, new_name))

    async def remove(self, name: str) -> None:
        """See `Files.remove`."""
        await self._beside(lambda: self._remove(name))

    async def close(self) -> None:
        """See `Files.close`. What threads have begun is finished."""
        await asyncio.to_thread(self._threads.shutdown)
        self._open.clear()

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # On a thread

    def _create(self, path: str, size_bytes: int) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(descriptor, size_bytes)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def _read(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        with self._open.use(name) as descriptor:
            return _read(descriptor, spans)

    def _write(self, name: str, parts: Sequence[tuple[int, Buffer]]) -> None:
        with self._open.use(name, to_write=True) as descriptor:
            at = 0
            for offset, sizes in _neighbours([(offset, len(data)) for offset, data in parts]):
                _pwrite(descriptor, [data for _, data in parts[at : at + len(sizes)]], offset)
                at += len(sizes)
            # A file that was removed, or whose folder was, takes bytes as before; only its name tells.
            if not self._open.is_current(name, descriptor):
                raise FileNotFoundError(errno.ENOENT, "removed while it was open", name)

    def _rename(self, name: str, new_name: str) -> None:
        os.rename(self._open.path(name), self._open.path(new_name))
        self._open.forget(name)

    def _remove(self, name: str) -> None:
        self._open.forget(name)
        os.unlink(self._open.path(name))


class _OpenFiles:
    """Descriptors kept open, the least recently used given up first; shared by threads, so none is closed in use."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[str, bool], int] = OrderedDict()
        self._num_users: dict[int, int] = {}

    def path(self, name: str) -> str:
        """Where the file is. Raises ValueError for a name that leads elsewhere."""
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in the folder")
        return f"{self._folder}/{name}"

    @contextmanager
    def use(self, name: str, *, to_write: bool = False) -> Iterator[int]:
        """A descriptor of the file that has this name now, for as long as the block takes."""
        descriptor = self._acquire((name, to_write))
        try:
            is_current = self.is_current(name, descriptor)
            if is_current:
                yield descriptor
        finally:
            self._release(descriptor)
        if is_current:
            return
        self.forget(name)  # kept open, but not the file of this name any more
        descriptor = self._acquire((name, to_write))
        try:
            yield descriptor
        finally:
            self._release(descriptor)

    def is_current(self, name: str, descriptor: int) -> bool:
        """Whether the name still leads to this file."""
        try:
            there = os.stat(self.path(name))
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))

    def forget(self, name: str) -> None:
        """Keep it open no longer."""
        with self._lock:
            for key in ((name, False), (name, True)):
                if (descriptor := self._cached.pop(key, None)) is not None:
                    self._let_go(descriptor)

    def clear(self) -> None:
        """Keep none open any longer."""
        with self._lock:
            while self._cached:
                self._let_go(self._cached.popitem()[1])

    def _acquire(self, key: tuple[str, bool]) -> int:
        with self._lock:
            descriptor = self._cached.get(key)
            if descriptor is not None:
                self._cached.move_to_end(key)
                self._num_users[descriptor] += 1
                return descriptor
        name, to_write = key
        descriptor = os.open(self.path(name), (os.O_RDWR if to_write else os.O_RDONLY) | os.O_CLOEXEC)
        with self._lock:
            self._num_users[descriptor] = 1
            if key not in self._cached:  # else another thread was faster: this one is closed after use
                self._cached[key] = descriptor
                self._num_users[descriptor] += 1
            while len(self._cached) > MAX_OPEN:
                self._let_go(self._cached.popitem(last=False)[1])
        return descriptor

    def _release(self, descriptor: int) -> None:
        with self._lock:
            self._let_go(descriptor)

    def _let_go(self, descriptor: int) -> None:
        self._num_users[descriptor] -= 1
        if not self._num_users[descriptor]:
            del self._num_users[descriptor]
            os.close(descriptor)


def _scan(folder: Path) -> list[FileInfo]:
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it has gone since
                    if entry.is_file():
                        found.append(FileInfo(entry.name, entry.stat().st_size))
    except FileNotFoundError:
        return []
    return sorted(found)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Zeros, with their place on the disk where the file system can promise it."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
    os.ftruncate(descriptor, size_bytes)


def _neighbours(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Spans in order, those that follow on one another as one: offset and the sizes."""
    start, end, sizes = 0, -1, list[int]()
    for offset, size in spans:
        if offset != end or len(sizes) == MAX_TRIP_PARTS:
            if sizes:
                yield start, sizes
            start, sizes = offset, []
        sizes.append(size)
        end = offset + size
    if sizes:
        yield start, sizes


def _read(descriptor: int, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
    found: list[Buffer] = []
    for offset, sizes in _neighbours(spans):
        data = _pread(descriptor, sum(sizes), offset)
        if len(sizes) == 1:
            found.append(data)
            continue
        view, start = memoryview(data), 0
        for size in sizes:
            found.append(view[start : start + size])
            start += size
    return found


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    """So many bytes, fewer only at the end of the file."""
    data = os.pread(descriptor, size, offset)
    if len(data) == size:
        return data
    pieces = [data]
    while data and (left := size - sum(map(len, pieces))):
        data = os.pread(descriptor, left, offset + size - left)
        pieces.append(data)
    return b"".join(pieces)


def _pwrite(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    """All of these, one after the other."""
    left = [view for buffer in buffers if (view := memoryview(buffer).cast("B"))]
    while left:
        num = os.pwritev(descriptor, left, offset) if len(left) > 1 else os.pwrite(descriptor, left[0], offset)
        offset += num
        while left and num >= len(left[0]):
            num -= len(left.pop(0))
        if num:
            left[0] = left[0][num:]
