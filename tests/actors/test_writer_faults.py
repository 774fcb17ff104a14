"""A writer whose files fail, vanish or are damaged, and that is killed: a block is missed, and never another's."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rules.slab import HEADER_BYTES, Slab
from actors.writer.actor import FULL_S
from bus.blocks import BATCH_BLOCKS
from bus.files import FileInfo
from bus.memory_files import MemoryFiles
from bus.subjects import ADOPT
from run.virtual import run_virtual
from schemas.cache import AdoptSlab
from schemas.failure import Code
from tests.actors.writing import SLOT_BYTES, assert_baseline, desk, key, slab_bytes


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_block_half_written_is_not_there(is_killed: bool) -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0, 1, 2)
            hold = front.world.files["writer/w0"].hold_next("write")
            storing = asyncio.create_task(front.store(3, 4, 5))
            await hold.is_reached.wait()
            assert front.found.keys() == {key(0), key(1), key(2)} == (await front.dump()).keys()
            assert await front.store(6) == 1  # nobody waits for it
            if is_killed:
                storing.cancel()
                await front.restart()
                assert front.found.keys() == {key(0), key(1), key(2), key(6)}
                assert await front.store(3, 4, 5) == 3
            else:
                hold.is_released.set()
                assert await storing == 3
            assert front.readable(*range(7)) == list(range(7))

    run_virtual(main())


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_slot_that_is_killed_in_mid_write_has_no_header(is_reused: bool) -> None:
    """So a restart does not even think that it is there: also where another block was before."""

    async def main() -> None:
        async with desk(num_slots=2) as (front, _):
            await front.store(0, 1)
            if is_reused:
                await front.drop(0, 1)
            else:
                await asyncio.sleep(2)
            hold = front.world.files["writer/w0"].hold_next("write")
            storing = asyncio.create_task(front.store(2))
            await hold.is_reached.wait()
            storing.cancel()
            await front.restart(2)
            assert front.found.keys() == (set() if is_reused else {key(0), key(1)})

    run_virtual(main())


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("operation", ["create", "write"])
def test_a_disk_error_is_answered_at_once_and_the_next_store_works(code: int, operation: str) -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            files = front.world.files["writer/w0"]
            if operation == "write":
                await front.store(0)
            files.fail_next(OSError(code, "no"), operation)  # type: ignore[arg-type]
            expected = Code.INTERNAL if (code, operation) == (errno.EIO, "write") else Code.OVERLOADED
            assert await front.refused(1, 2) == expected
            assert front.readable(0, 1, 2) == ([0] if operation == "write" else [])
            assert len(front.world.folder.files) == (1 if operation == "write" else 0)
            assert_baseline(writer)
            await asyncio.sleep(2)
            assert await front.store(1, 2) == 2
            assert front.readable(1, 2) == [1, 2]

    run_virtual(main())


def test_a_slot_that_cannot_be_freed_is_not_given_away_until_it_can() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0)
            front.room.may_add = False
            await front.store(*range(1, 8))
            await asyncio.sleep(5)
            front.world.files["writer/w0"].fail_next(OSError(errno.EIO, "no"), "write")
            await front.drop(0, 1)
            assert front.found.keys() == {key(number) for number in range(2, 8)}
            assert writer.load().detail["free_slots"] == 0
            assert await front.store(8, 9) == 2  # it asks for room, and so tries again
            assert front.readable(*range(10)) == list(range(2, 10))

    run_virtual(main())


def test_a_deleted_folder_is_noticed_and_replaced() -> None:
    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(*range(4))
            await asyncio.sleep(2)
            await front.store(4, 5)
            assert len(front.world.folder.files) == 2
            front.world.files["writer/w0"].vanish()
            assert await front.refused(6) == Code.INTERNAL
            assert front.found == {} == await front.dump()
            await asyncio.sleep(2)
            assert await front.store(*range(4)) == 4
            assert front.readable(*range(4)) == list(range(4))

    run_virtual(main())


def test_readers_tell_it_of_a_deleted_folder() -> None:
    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(*range(4))
            await asyncio.sleep(2)
            await front.store(4, 5)
            front.world.files["writer/w0"].vanish()
            await front.report_failed(0)
            assert front.found == {}

    run_virtual(main())


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_flipped_byte_is_a_miss_and_is_dropped_once_it_is_told_of(where: int, is_restarted: bool) -> None:
    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(*range(4))
            (name,) = front.world.folder.files
            offset = where % slab_bytes(4)
            front.world.files["writer/w0"].flip(name, offset)
            hurt = (offset - HEADER_BYTES) // SLOT_BYTES  # -1: the header of the file, without which none can be read
            good = [number for number in range(4) if number != hurt and hurt >= 0]
            assert front.readable(*range(4)) == good
            if is_restarted:
                await front.restart(4)
                assert set(front.readable(*range(4))) == set(good)
            failed = [number for number in range(4) if number not in good and key(number) in front.found]
            if failed:
                await front.report_failed(*failed)
            healed = list(range(4)) if hurt < 0 and not is_restarted else good
            assert front.readable(*range(4)) == healed
            assert front.found.keys() == {key(number) for number in healed}
            assert await front.store(*range(4)) == 4 - len(healed)
            assert front.readable(*range(4)) == list(range(4))

    run_virtual(main())


@pytest.mark.parametrize("size_bytes", [0, 40, HEADER_BYTES, HEADER_BYTES + 20, slab_bytes(2), slab_bytes(3) - 1])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_cut_file_has_what_is_whole(size_bytes: int, is_restarted: bool) -> None:
    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(*range(4))
            (name,) = front.world.folder.files
            front.world.files["writer/w0"].truncate(name, size_bytes)
            whole = list(range(max(size_bytes - HEADER_BYTES, 0) // SLOT_BYTES))
            assert front.readable(*range(4)) == whole
            if is_restarted:
                await front.restart(4)
                assert front.found.keys() == {key(number) for number in whole}
            else:
                await front.report_failed(*range(4))
                assert front.found.keys() == {key(number) for number in whole}
            assert await front.store(*range(4)) == 4 - len(whole)
            assert front.readable(*range(4)) == list(range(4))

    run_virtual(main())


def test_a_wrong_report_drops_nothing() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(*range(4))
            await front.report_failed(*range(4))
            assert front.readable(*range(4)) == list(range(4))
            front.world.files["writer/w0"].fail_next(OSError(errno.EIO, "worn out"), "read")
            await front.report_failed(1, 2)  # and one that cannot be proven wrong does
            assert front.readable(*range(4)) == [0, 3]

    run_virtual(main())


def test_a_file_that_a_later_one_of_its_name_has_taken_over_is_let_go() -> None:
    """Its header is not damaged, and not to be mended: what the later one writes would not be read any more."""

    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0, 1)
            (data,) = front.world.folder.files.values()
            data[:HEADER_BYTES] = header = replace(Slab.unpack(data), epoch=2).pack()
            await front.report_failed(0)
            assert data[:HEADER_BYTES] == header
            assert front.found == {} and writer.load().detail["slots"] == 0

    run_virtual(main())


def test_what_a_cut_left_of_a_header_does_not_come_back() -> None:
    """A slot is free, as its payload is cut off, and is written again: until that is done nothing is there."""

    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(*range(4))
            (name,) = front.world.folder.files
            front.world.files["writer/w0"].truncate(name, slab_bytes(2) + HEADER_BYTES + 20)
            await front.restart(4)
            hold = front.world.files["writer/w0"].hold_next("write")
            storing = asyncio.create_task(front.store(8, 9))
            await hold.is_reached.wait()
            storing.cancel()
            await front.restart(4)
            assert len(front.world.folder.files[name]) >= slab_bytes(3)
            assert front.found.keys() == {key(0), key(1)}

    run_virtual(main())


def test_a_report_of_a_block_that_was_there_before_hides_no_other_and_is_put_right() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(0, 1)
            (name,) = front.world.folder.files
            front.world.files["writer/w0"].flip(name, HEADER_BYTES + 100)
            front.found[key(7)] = front.found[key(0)]  # as one who missed that slot 0 has another block now
            await front.report_failed(0, 7)
            assert front.found.keys() == {key(1)}

    run_virtual(main())


def test_a_new_file_that_cannot_be_written_is_removed() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            front.world.files["writer/w0"].fail_next(OSError(errno.EIO, "no"), "write")
            assert await front.refused(1) == Code.OVERLOADED
            assert front.world.folder.files == {}
            await asyncio.sleep(2)
            assert await front.store(1) == 1

    run_virtual(main())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_without_a_place_for_a_file_it_asks_for_slots_alone_for_a_while(code: int) -> None:
    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(0, 1, 2)
            files = front.world.files["writer/w0"]
            for _ in range(9):
                files.fail_next(OSError(code, "no"), "create")
            front.room.asked.clear()
            await front.store(3)
            for number in (4, 5):
                await asyncio.sleep(5)
                assert await front.refused(number) == Code.OVERLOADED
            sizes = [asked.slab_bytes for asked in front.room.asked]
            assert sizes == [slab_bytes(4), 0, 0, 0]
            files.heal()
            await asyncio.sleep(FULL_S)
            assert await front.store(4) == 1

    run_virtual(main())


def test_a_disk_that_is_too_small_for_a_file_gets_a_smaller_one() -> None:
    """Without any, no block whose key the writer owns could be stored."""

    async def main() -> None:
        async with desk(num_slots=8 * BATCH_BLOCKS) as (front, writer):
            front.world.folder.max_bytes = slab_bytes(3 * BATCH_BLOCKS) + HEADER_BYTES
            assert await front.store(*range(BATCH_BLOCKS)) == BATCH_BLOCKS
            assert [len(data) for data in front.world.folder.files.values()] == [slab_bytes(2 * BATCH_BLOCKS)]
            assert [asked.slab_bytes for asked in front.room.asked] == [slab_bytes(8 * BATCH_BLOCKS)]
            await front.store(*range(BATCH_BLOCKS, 2 * BATCH_BLOCKS))
            await asyncio.sleep(1)
            assert writer.load().detail["slots"] == 3 * BATCH_BLOCKS, "more, for it was nearly full"
            await front.store(*range(2 * BATCH_BLOCKS, 3 * BATCH_BLOCKS))
            await asyncio.sleep(1)
            assert front.readable(*range(3 * BATCH_BLOCKS)) == list(range(3 * BATCH_BLOCKS))
            asked = front.room.asked[-1]
            assert asked.slab_bytes == 0 and asked.num_slots < BATCH_BLOCKS, "it holds little, and needs little"
            await front.restart()
            assert front.readable(*range(3 * BATCH_BLOCKS)) == list(range(3 * BATCH_BLOCKS))

    run_virtual(main())


def test_a_file_of_its_name_with_a_number_that_no_slab_has_is_removed_or_gets_another() -> None:
    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(0, 1)
            files = front.world.folder.files
            (name,) = files
            files["8000000000.w0.slab"] = bytearray(files[name])
            await front.restart()
            assert list(files) == [name] and front.readable(0, 1) == [0, 1]
            files["ffffffffff.gone.slab"] = files.pop(name)
            await front.report_failed(0)
            assert front.found == {}
            await front.bus.ask(ADOPT.at("w0"), AdoptSlab(name="ffffffffff.gone.slab"), timeout_s=1)
            assert front.readable(0, 1) == [0, 1]

    run_virtual(main())


def test_a_file_that_cannot_be_removed_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(files: MemoryFiles, name: str) -> None:
        raise PermissionError(errno.EPERM, "no", name)

    async def main() -> None:
        async with desk(num_slots=4) as (front, _):
            await front.store(0)
            front.world.folder.files["8000000000.w0.slab"] = bytearray(9)
            await front.restart()
            front.room.may_add = False
            for _ in range(5):
                await asyncio.sleep(5)
                assert await front.refused(10, 11, 12, 13) == Code.OVERLOADED
            assert len(front.room.asked) >= 5

    monkeypatch.setattr(MemoryFiles, "remove", refuse)
    run_virtual(main())
    assert [record.levelname for record in caplog.records if "left alone" in record.message].count("WARNING") == 1


@pytest.mark.parametrize("failing", ["adopt", "remove"])
def test_a_file_that_cannot_be_taken_over_or_removed_is_tried_again(failing: str) -> None:
    async def main() -> None:
        async with desk(num_slots=4) as (front, writer):
            await front.store(0, 1)
            files = front.world.files["writer/w0"]
            if failing == "adopt":
                (name,) = files.folder.files
                files.folder.files["00000000ff.gone.slab"] = files.folder.files.pop(name)
                await front.report_failed(0)
                assert front.found == {}
                files.fail_next(OSError(errno.EIO, "no"), "read")
                await front.bus.ask(ADOPT.at("w0"), AdoptSlab(name="00000000ff.gone.slab"), timeout_s=1)
                assert front.found == {}
            else:
                await front.drop(0, 1)
                files.fail_next(OSError(errno.EIO, "no"), "remove")
                assert await front.refused(2, space="other") == Code.OVERLOADED
            await asyncio.sleep(2)
            assert await front.store(2, space="other") == 1
            await asyncio.sleep(2)
            assert front.readable(0, 1, 2) == ([0, 1, 2] if failing == "adopt" else [2])
            assert writer.load().detail["slots"] == 4 * len(files.folder.files)

    run_virtual(main())


def test_a_file_made_while_the_missing_ones_are_looked_for_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(0)
            files, may_return = front.world.files["writer/w0"], asyncio.Event()
            look = files.list

            async def look_long() -> list[FileInfo]:
                found = await look()
                await may_return.wait()
                return found

            monkeypatch.setattr(files, "list", look_long)
            files.vanish()
            storing = asyncio.create_task(front.refused(1))
            await asyncio.sleep(1)
            assert await front.store(2, space="other") == 1
            may_return.set()
            assert await storing == Code.INTERNAL
            assert front.found.keys() == {key(2)}
            assert front.readable(2) == [2]

    run_virtual(main())
