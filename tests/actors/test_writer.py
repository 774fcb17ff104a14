"""The writer: what it says is there can be read, whatever happens to its files."""

from __future__ import annotations

import asyncio
import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rules.location import Location
from actors.rules.slab import HEADER_BYTES, Slab
from actors.writer import actor as writer_actor
from bus.bus import BusError
from bus.subjects import ADOPT, DUMP, STORE
from run.virtual import run_virtual
from schemas.bulk import Payload
from schemas.cache import AdoptSlab, DumpBlocks, StoreBlocks
from schemas.failure import Code
from tests.actors.writing import SLOT_BYTES, TIMEOUT_S, Desk, Room, assert_baseline, desk, key, payload, slab_bytes


def room(front: Desk) -> Room:
    actor = front.world.actors["kvstore/k0"]
    assert isinstance(actor, Room)
    return actor


async def refused(front: Desk, *numbers: int, size: int = 200) -> Code:
    with pytest.raises(BusError) as caught:
        await front.store(*numbers, size=size)
    return caught.value.code


def test_what_is_stored_can_be_read_and_is_found_again_after_a_restart() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            assert await front.store(*range(5)) == 5
            assert await front.store(3, 4, 5, 5, approximate=True) == 1
            assert await front.store(*range(5)) == 0
            assert front.readable(*range(7)) == list(range(6))
            assert front.read(5) == payload(5, approximate=True)
            before = dict(front.found)
            assert await front.dump() == before
            epoch = Slab.unpack(next(iter(front.world.folder.files.values()))).epoch
            writer = await front.restart()
            assert front.found == before
            assert front.readable(*range(7)) == list(range(6))
            assert Slab.unpack(next(iter(front.world.folder.files.values()))).epoch == epoch + 1
            assert await front.store(*range(8)) == 3  # 5 as an exact one
            assert front.readable(*range(8)) == list(range(8))
            assert writer.load().detail["blocks"] == 8

    run_virtual(main())


def test_an_exact_block_takes_the_place_of_an_approximate_one() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(1, 2, approximate=True)
            old = front.found[key(1)]
            assert Location.unpack(old).approximate
            assert await front.store(1) == 1
            new = front.found[key(1)]
            assert new != old and not Location.unpack(new).approximate
            assert front.read(1) == payload(1)
            assert front.read_at(old, 1) is None
            assert await front.store(1, 2, approximate=True) == 0
            assert front.read(1) == payload(1)
            assert writer.load().detail["free_slots"] == 6
            await front.restart()
            assert (front.read(1), front.read(2)) == (payload(1), payload(2, approximate=True))

    run_virtual(main())


def test_a_drop_frees_what_is_meant_and_nothing_else() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0)
            room(front).may_add = False
            await front.store(*range(1, 8))
            at_three = front.found[key(3)]
            await front.drop(1, 2)
            await front.drop(1, 2)  # not there any more
            await front.drop(4, location=at_three)  # another block's place
            await front.drop(5, location=Location(12345, 0).pack())  # another's slab
            assert front.readable(*range(8)) == [0, 3, 4, 5, 6, 7]
            assert writer.load().detail["free_slots"] == 2
            assert await front.store(8, 9) == 2
            assert len(front.world.folder.files) == 1
            await front.restart()
            assert front.readable(*range(10)) == [0, 3, 4, 5, 6, 7, 8, 9]

    run_virtual(main())


def test_room_is_asked_for_before_it_runs_out_and_not_all_the_time() -> None:
    async def main() -> None:
        async with desk(num_slots=16) as (front, writer):
            await front.store(*range(14))
            assert len(room(front).asked) == 1
            room(front).may_add = False
            await asyncio.sleep(2)
            for number in (14, 15):
                await front.store(number)
            assert [asked.num_slots >= 1 for asked in room(front).asked] == [True, True]
            assert await refused(front, 16) == Code.OVERLOADED
            assert len(room(front).asked) == 2
            await asyncio.sleep(2)
            room(front).may_add = True
            assert await front.store(16) == 1
            assert writer.load().detail["slots"] == 32
            assert room(front).asked[-1].slab_bytes == slab_bytes(16)
            assert {len(data) for data in front.world.folder.files.values()} == {slab_bytes(16)}

    run_virtual(main())


def test_without_a_kvstore_it_goes_on_with_the_room_it_has() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(0)
            front.world.kill("kvstore/k0")
            assert await front.store(*range(1, 8)) == 7
            assert await refused(front, 9) == Code.OVERLOADED
            await front.drop(3)
            assert await front.store(9) == 1

    run_virtual(main())


def test_blocks_of_an_older_model_are_kept_until_they_are_dropped() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(1, 2, space="old", size=300)
            await asyncio.sleep(2)
            await front.store(3, 4)
            assert len(front.world.folder.files) == 2
            await front.restart()
            assert {key(number) for number in (1, 2, 3, 4)} == front.found.keys()
            old = Location.unpack(front.found[key(1)]).slab
            await front.drop(1, 2)
            await front.store(*range(5, 11))
            await asyncio.sleep(2)
            await front.store(11, 12)
            numbers = [int(name.partition(".")[0], 16) for name in front.world.folder.files]
            assert old not in numbers and len(numbers) == 2
            assert front.readable(*range(3, 13)) == list(range(3, 13))

    run_virtual(main())


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
            assert await refused(front, 1, 2) == expected
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
            room(front).may_add = False
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
            assert await refused(front, 6) == Code.INTERNAL
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


def test_a_slab_of_a_writer_that_is_gone_is_adopted() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(*range(4))
            (name,) = front.world.folder.files
            orphan = f"00000000ff.gone{name[name.rindex('.'):]}"
            front.world.folder.files[orphan] = front.world.folder.files.pop(name)
            await front.restart()
            assert front.found == {}
            await front.store(1)
            adopt = AdoptSlab(name=orphan)
            await front.bus.ask(ADOPT.at("w0"), adopt, timeout_s=TIMEOUT_S)
            await front.bus.ask(ADOPT.at("w0"), adopt, timeout_s=TIMEOUT_S)
            assert "00000000ff.w0.slab" in front.world.folder.files
            assert front.readable(*range(4)) == list(range(4))
            assert (await front.dump()).keys() == {key(number) for number in range(4)}
            for wrong, code in (("0000000001.gone.slab", Code.NOT_FOUND), ("../x", Code.BAD_REQUEST)):
                with pytest.raises(BusError) as caught:
                    await front.bus.ask(ADOPT.at("w0"), AdoptSlab(name=wrong), timeout_s=TIMEOUT_S)
                assert caught.value.code == code

    run_virtual(main())


def test_payloads_that_do_not_come_take_no_slot() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0)
            handle = front.bulk.offer(payload(1), lease_s=60.0)
            front.bulk.withdraw(handle)
            message = StoreBlocks(space="tiny 1", keys=key(1), parents=key(0), payloads=Payload(handle=handle))
            with pytest.raises(BusError) as caught:
                await front.bus.ask(STORE.at("w0"), message, timeout_s=TIMEOUT_S)
            assert caught.value.code == Code.TRANSFER_FAILED
            assert_baseline(writer)
            assert front.found.keys() == {key(0)}

    run_virtual(main())


def test_an_asker_that_gives_up_leaves_nothing_in_work() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0)
            for number in range(1, 12):
                storing = asyncio.create_task(front.store(number % 7))
                for _ in range(number):
                    await asyncio.sleep(0)
                storing.cancel()
                await asyncio.wait([storing])
            await asyncio.sleep(1)
            assert_baseline(writer)

    run_virtual(main())


def test_what_is_in_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_actor, "MAX_WORK_BYTES", 500)

    async def main() -> None:
        async with desk() as (front, _):
            await front.store(0)
            hold = front.world.files["writer/w0"].hold_next("write")
            storing = asyncio.create_task(front.store(1, 2))
            await hold.is_reached.wait()
            assert await refused(front, 3) == Code.OVERLOADED
            hold.is_released.set()
            assert await storing == 2
            assert await front.store(3) == 1

    run_virtual(main())


def test_two_who_store_one_block_at_once_leave_one() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0)
            stores = [front.store(1, 2), front.store(1, 2, approximate=True), front.store(2, 1)]
            assert sum(await asyncio.gather(*stores)) in (2, 3, 4)
            assert (front.read(1), front.read(2)) == (payload(1), payload(2))
            assert writer.load().detail["free_slots"] == 5

    run_virtual(main())


@pytest.mark.parametrize(
    "message",
    [
        StoreBlocks(space="s", keys=b"", parents=b"", payloads=Payload()),
        StoreBlocks(space="s", keys=key(0), parents=b"", payloads=Payload(inline=b"x")),
        StoreBlocks(space="s", keys=key(0)[:-1], parents=key(0), payloads=Payload(inline=b"x")),
        StoreBlocks(space="s", keys=key(0) * 2, parents=key(0) * 2, payloads=Payload(inline=b"xyz")),
        StoreBlocks(space="s", keys=key(0), parents=key(0), payloads=Payload()),
    ],
)
def test_what_makes_no_sense_is_refused(message: StoreBlocks) -> None:
    async def main() -> None:
        async with desk() as (front, _):
            with pytest.raises(BusError) as caught:
                await front.bus.ask(STORE.at("w0"), message, timeout_s=TIMEOUT_S)
            assert caught.value.code == Code.BAD_REQUEST

    run_virtual(main())


def test_a_dump_for_shards_is_shared_out() -> None:
    async def main() -> None:
        async with desk(num_slots=40) as (front, _):
            await front.store(*range(40))
            keys = b""
            for shard in ("m0", "m1"):
                request = DumpBlocks(shard=shard, shards=["m1", "m0"])
                dumped = await front.bus.ask(DUMP.at("w0"), request, timeout_s=TIMEOUT_S)
                assert Location.unpack(front.found[key(0)]).slab in dumped.slabs
                keys += await front.bulk.unwrap(dumped.keys)
            assert sorted(keys[at : at + 16] for at in range(0, len(keys), 16)) == sorted(front.found)

    run_virtual(main())
