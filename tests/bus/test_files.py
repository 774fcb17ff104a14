"""Files: one suite over a folder of the operating system and one in memory; then what only one of them does."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import bus.files as seam
from bus.files import Files, PosixFiles
from bus.memory_files import MemoryFiles
from tests.conftest import Run

NAME = "one.slab"


class Place:
    """A folder, the way the system under test sees it, and what may happen to it from outside."""

    def __init__(self, files: Files, delete: Callable[[], None], cut_off: Callable[[str, int], None]) -> None:
        self.files = files
        self.delete = delete
        self.cut_off = cut_off


@pytest.fixture(params=["posix", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """A folder that is not there yet."""

    def place() -> Place:
        if request.param == "memory":
            memory = MemoryFiles()
            return Place(memory, memory.vanish, memory.truncate)
        folder = tmp_path / "deep" / "cache"
        posix = PosixFiles(folder)
        return Place(posix, lambda: shutil.rmtree(folder), lambda name, size: os.truncate(folder / name, size))

    return place


@asynccontextmanager
async def opened(make: Callable[[], Place]) -> AsyncIterator[Place]:
    place = make()
    try:
        yield place
    finally:
        await place.files.close()
        await place.files.close()


class TestFiles:
    def test_what_is_written_is_read(self, run_async: Run, make: Callable[[], Place]) -> None:
        async def main() -> None:
            async with opened(make) as place:
                files = place.files
                assert await files.list() == []
                await files.create("two.slab", 10)
                await files.create(NAME, 1000)
                assert await files.list() == [(NAME, 1000), ("two.slab", 10)]
                assert bytes((await files.read(NAME, [(0, 1000)]))[0]) == bytes(1000)
                data = os.urandom(300)
                parts = [(100, data[:100]), (200, memoryview(data)[100:200]), (700, bytearray(data[200:])), (650, b"")]
                await files.write(NAME, parts)
                spans = [(700, 100), (100, 50), (150, 150), (300, 0), (300, 1), (99, 1)]
                got = [bytes(piece) for piece in await files.read(NAME, spans)]
                assert got == [data[200:], data[:50], data[50:200], b"", b"\0", b"\0"]
                await files.write(NAME, [(0, b"old"), (1, b"new")])
                assert bytes((await files.read(NAME, [(0, 4)]))[0]) == b"onew"

        run_async(main())

    def test_reading_ends_where_the_file_does(self, run_async: Run, make: Callable[[], Place]) -> None:
        async def main() -> None:
            async with opened(make) as place:
                await place.files.create(NAME, 100)
                await place.files.write(NAME, [(0, b"x" * 100)])
                place.cut_off(NAME, 25)
                spans = [(0, 10), (10, 10), (20, 10), (30, 10), (50, 10)]
                assert [len(piece) for piece in await place.files.read(NAME, spans)] == [10, 10, 5, 0, 0]

        run_async(main())

    def test_no_file_is_made_twice(self, run_async: Run, make: Callable[[], Place]) -> None:
        async def main() -> None:
            async with opened(make) as place:
                await place.files.create(NAME, 4)
                await place.files.write(NAME, [(0, b"kept")])
                with pytest.raises(FileExistsError):
                    await place.files.create(NAME, 100)
                assert bytes((await place.files.read(NAME, [(0, 9)]))[0]) == b"kept"

        run_async(main())

    def test_what_is_not_there_is_said(self, run_async: Run, make: Callable[[], Place]) -> None:
        async def main() -> None:
            async with opened(make) as place:
                files = place.files
                for _ in range(2):
                    for work in (
                        files.read(NAME, [(0, 1)]),
                        files.write(NAME, [(0, b"x")]),
                        files.rename(NAME, "two.slab"),
                        files.remove(NAME),
                    ):
                        with pytest.raises(FileNotFoundError):
                            await work
                    await files.create("other.slab", 1)
                    await files.remove("other.slab")
                assert await files.list() == []

        run_async(main())

    def test_a_file_has_one_name_and_one_new_owner(self, run_async: Run, make: Callable[[], Place]) -> None:
        async def main() -> None:
            async with opened(make) as place:
                files = place.files
                await files.create(NAME, 4)
                await files.write(NAME, [(0, b"data")])
                taking = [files.rename(NAME, "a.slab"), files.rename(NAME, "b.slab")]
                outcomes = await asyncio.gather(*taking, return_exceptions=True)
                assert [type(outcome) for outcome in outcomes if outcome is not None] == [FileNotFoundError]
                new_name = "a.slab" if outcomes[0] is None else "b.slab"
                assert await files.list() == [(new_name, 4)]
                assert bytes((await files.read(new_name, [(0, 4)]))[0]) == b"data"
                for work in (files.read(NAME, [(0, 1)]), files.write(NAME, [(0, b"x")])):
                    with pytest.raises(FileNotFoundError):
                        await work

        run_async(main())

    def test_what_is_written_to_a_deleted_folder_is_not_called_written(
        self, run_async: Run, make: Callable[[], Place]
    ) -> None:
        async def main() -> None:
            async with opened(make) as place:
                files = place.files
                await files.create(NAME, 4)
                await files.write(NAME, [(0, b"data")])
                assert len(await files.read(NAME, [(0, 4)])) == 1
                place.delete()
                for work in (files.write(NAME, [(0, b"more")]), files.read(NAME, [(0, 4)])):
                    with pytest.raises(FileNotFoundError):
                        await work
                await files.create(NAME, 4)  # and it goes on, in a new folder
                await files.write(NAME, [(1, b"new")])
                assert bytes((await files.read(NAME, [(0, 4)]))[0]) == b"\0new"

        run_async(main())


class TestPosixFiles:
    def test_short_reads_and_writes_go_on(
        self, run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pread, pwrite, pwritev = os.pread, os.pwrite, os.pwritev
        monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 7), at))
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0], views[1][:3]], at))

        async def main() -> None:
            files = PosixFiles(tmp_path)
            await files.create(NAME, 2000)
            data = os.urandom(1000)
            await files.write(NAME, [(500 + at, data[at : at + 100]) for at in range(0, 1000, 100)])
            got = await files.read(NAME, [(500 + at, 250) for at in range(0, 1000, 250)])
            assert b"".join(got) == data
            assert [len(piece) for piece in await files.read(NAME, [(1990, 10), (2000, 10)])] == [10, 0]
            await files.close()

        run_async(main())

    def test_a_file_that_is_removed_while_it_is_written_is_not_written(
        self, run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pwrite = os.pwrite

        def meet(descriptor: int, data: memoryview, at: int) -> int:
            (tmp_path / NAME).unlink()
            return pwrite(descriptor, data, at)

        async def main() -> None:
            files = PosixFiles(tmp_path)
            await files.create(NAME, 10)
            monkeypatch.setattr(os, "pwrite", meet)
            with pytest.raises(FileNotFoundError):
                await files.write(NAME, [(0, b"x")])
            await files.close()

        run_async(main())

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
    def test_a_disk_that_cannot_reserve(
        self, run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def refuse(*_: int) -> None:
            raise OSError(code, "no")

        monkeypatch.setattr(os, "posix_fallocate", refuse)

        async def main() -> None:
            files = PosixFiles(tmp_path)
            await files.create(NAME, 12345)
            assert await files.list() == [(NAME, 12345)]
            await files.close()

        run_async(main())

    def test_a_full_disk_leaves_no_file(self, run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fill(descriptor: int, *_: int) -> None:
            os.pwrite(descriptor, b"half", 0)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(os, "posix_fallocate", fill)

        async def main() -> None:
            files = PosixFiles(tmp_path)
            with pytest.raises(OSError) as caught:
                await files.create(NAME, 12345)
            assert caught.value.errno == errno.ENOSPC
            assert await files.list() == []
            await files.close()

        run_async(main())

    def test_few_files_are_kept_open_and_none_at_the_end(
        self, run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(seam, "MAX_OPEN", 3)

        def num_open() -> int:
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
            return sum(link.startswith(str(tmp_path)) for link in links)

        async def main() -> None:
            files = PosixFiles(tmp_path)
            names = [f"{n}.slab" for n in range(12)]
            for name in names:
                await files.create(name, 10)
                await files.write(name, [(0, name.encode())])

            async def check(name: str) -> None:
                assert bytes((await files.read(name, [(0, len(name))]))[0]) == name.encode()
                await files.write(name, [(0, name.encode())])

            await asyncio.gather(*(check(name) for name in names * 8))
            assert num_open() == 3
            for name in names:
                await files.remove(name)
            assert num_open() == 0
            await files.create(NAME, 1)
            await files.write(NAME, [(0, b"x")])
            assert num_open() == 1
            await files.close()
            assert num_open() == 0

        if os.path.isdir("/proc/self/fd"):
            run_async(main())

    def test_the_loop_goes_on_while_a_disk_does_not(
        self, run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = threading.Event()
        pread = os.pread

        def stuck(*args: int) -> bytes:
            gate.wait()
            return pread(*args)

        async def main() -> None:
            files = PosixFiles(tmp_path)
            await files.create(NAME, 10)
            monkeypatch.setattr(os, "pread", stuck)
            reading = asyncio.create_task(files.read(NAME, [(0, 10)]))  # type: ignore[arg-type]
            assert await files.list() == [(NAME, 10)]
            assert not reading.done()
            gate.set()
            assert [bytes(piece) for piece in await reading] == [bytes(10)]
            await files.close()

        run_async(main())

    def test_what_is_written_is_made_beside_the_loop(self, run_async: Run, tmp_path: Path) -> None:
        def parts() -> Iterator[tuple[int, bytes]]:
            made_on.append(threading.current_thread())
            yield 0, b"data"

        async def main() -> None:
            files = PosixFiles(tmp_path)
            await files.create(NAME, 4)
            await files.write(NAME, parts())
            assert bytes((await files.read(NAME, [(0, 4)]))[0]) == b"data"
            await files.close()

        made_on: list[threading.Thread] = []
        run_async(main())
        assert made_on and made_on != [threading.current_thread()]

    def test_what_it_makes_is_its_users_alone(self, run_async: Run, tmp_path: Path) -> None:
        """Blocks are what people have written: a folder that was deleted is made again by a writer."""
        folder = tmp_path / "store"

        async def main() -> None:
            files = PosixFiles(folder)
            await files.create(NAME, 4)
            shutil.rmtree(folder)
            await files.create(NAME, 4)
            await files.close()

        umask = os.umask(0o022)
        try:
            run_async(main())
        finally:
            os.umask(umask)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / NAME)] == [0o700, 0o600]

    def test_no_name_leads_out_of_the_folder(self, run_async: Run, tmp_path: Path) -> None:
        async def main() -> None:
            files = PosixFiles(tmp_path / "inner")
            for name in ("../outside", "a/b", "..", ".", ""):
                with pytest.raises(ValueError, match="not the name"):
                    await files.create(name, 1)
            await files.close()

        run_async(main())
        assert list(tmp_path.iterdir()) == []


class TestMemoryFiles:
    def test_a_fault_comes_once_and_tears_a_write(self, run_async: Run) -> None:
        async def main() -> None:
            files = MemoryFiles()
            await files.create(NAME, 10)
            files.fail_next(OSError(errno.EIO, "worn out"), "write")
            assert bytes((await files.read(NAME, [(0, 2)]))[0]) == bytes(2)
            with pytest.raises(OSError, match="worn out"):
                await files.write(NAME, [(0, b"abc"), (5, b"def")])
            assert files.folder.files[NAME] == b"abc" + bytes(7)
            await files.write(NAME, [(0, b"abc"), (5, b"def")])
            files.flip(NAME, 0)
            assert files.folder.files[NAME] == b"\x9ebc\0\0def\0\0"

        run_async(main())

    def test_one_that_is_cut_off_in_mid_write_writes_no_more(self, run_async: Run) -> None:
        async def main() -> None:
            files = MemoryFiles()
            other = MemoryFiles(files.folder)
            await files.create(NAME, 10)
            hold = files.hold_next("write")
            writing = asyncio.create_task(files.write(NAME, [(0, b"0123456789")]))
            await hold.is_reached.wait()
            files.cut()
            hold.is_released.set()
            await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            assert bytes((await other.read(NAME, [(0, 10)]))[0]) == b"01234" + bytes(5)

        run_async(main())


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")
