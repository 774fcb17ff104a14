"""The writer: what it says is there can be read; what it is told to drop is not; what it is sent is bounded."""

from __future__ import annotations

import asyncio

import pytest

from actors.rules.location import Location, parse_name
from actors.rules.slab import Slab
from actors.writer import actor as writer_actor
from actors.writer import disk as disk_module
from bus.bus import BusError
from bus.subjects import ADOPT, DROP, DUMP, FAILED, STORE
from run.virtual import run_virtual
from schemas.bulk import Payload
from schemas.cache import AdoptSlab, BlocksFailed, DropBlocks, DumpBlocks, StoreBlocks
from schemas.failure import Code
from schemas.message import Role
from tests.actors.writing import TIMEOUT_S, assert_baseline, desk, key, payload, slab_bytes


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


def test_a_slab_is_taken_over_some_slots_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(*range(7))
            monkeypatch.setattr(disk_module, "SCAN_SLOTS", 2)
            writer = await front.restart()
            assert front.readable(*range(7)) == list(range(7))
            assert front.seqs[writer.incarnation] == 4, "others have their turn in between"

    run_virtual(main())


def test_what_is_there_and_offered_again_is_told_of_again() -> None:
    """Who offers it did not find it: somebody has not heard of it, as where a copy of it was dropped."""

    async def main() -> None:
        async with desk() as (front, _):
            await front.store(0, 1)
            await front.store(2, approximate=True)
            front.found.clear()
            assert await front.store(0) == 0
            assert await front.store(1, 2, 3, approximate=True) == 1
            assert front.readable(0, 1, 2, 3) == [0, 1, 2, 3]

    run_virtual(main())


def test_a_drop_that_makes_no_sense_is_refused() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(0)
            for drop in (DropBlocks(keys=key(0), locations=bytes(16)), DropBlocks(keys=key(0)[1:], locations=bytes(8))):
                with pytest.raises(BusError) as caught:
                    await front.bus.ask(DROP.at("w0"), drop, timeout_s=TIMEOUT_S)
                assert caught.value.code == Code.BAD_REQUEST
            event = BlocksFailed(keys=key(0), locations=bytes(16), reason="test")
            await front.bus.tell(FAILED.at(Role.PREFILL), event)
            assert await front.store(1) == 1

    run_virtual(main())


def test_a_drop_frees_what_is_meant_and_nothing_else() -> None:
    async def main() -> None:
        async with desk() as (front, writer):
            await front.store(0)
            front.room.may_add = False
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
            assert len(front.room.asked) == 1
            front.room.may_add = False
            await asyncio.sleep(2)
            for number in (14, 15):
                await front.store(number)
            assert [asked.num_slots >= 1 for asked in front.room.asked] == [True, True]
            for _ in range(3):
                assert await front.refused(16) == Code.OVERLOADED
            assert len(front.room.asked) == 2
            await asyncio.sleep(2)
            front.room.may_add = True
            assert await front.store(16) == 1
            assert writer.load().detail["slots"] == 32
            assert front.room.asked[-1].slab_bytes == slab_bytes(16)
            assert {len(data) for data in front.world.folder.files.values()} == {slab_bytes(16)}

    run_virtual(main())


def test_room_that_is_long_in_coming_is_waited_for_by_nobody_and_comes() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            front.room.delay_s = 5.0
            asked_s = asyncio.get_running_loop().time()
            assert await front.refused(0) == Code.OVERLOADED
            assert asyncio.get_running_loop().time() - asked_s < 3.0  # of virtual time
            await asyncio.sleep(5)
            assert await front.store(0) == 1
            assert len(front.room.asked) == 1

    run_virtual(main())


def test_without_a_kvstore_it_goes_on_with_the_room_it_has() -> None:
    async def main() -> None:
        async with desk() as (front, _):
            await front.store(0)
            front.world.kill("kvstore/k0")
            assert await front.store(*range(1, 8)) == 7
            assert await front.refused(9) == Code.OVERLOADED
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
            await front.bus.ask(ADOPT.at("w0"), AdoptSlab(name=orphan), timeout_s=TIMEOUT_S)
            names = [parse_name(name) for name in front.world.folder.files]
            assert [name[1] for name in names if name] == ["w0", "w0"]
            assert (0xFF, "w0") not in names, "what is said of the old number is not meant of this slab"
            assert front.readable(*range(4)) == list(range(4))
            assert (await front.dump()).keys() == {key(number) for number in range(4)}
            for wrong, code in ((orphan, Code.NOT_FOUND), ("../x", Code.BAD_REQUEST)):
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
            assert await front.refused(3) == Code.OVERLOADED
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
