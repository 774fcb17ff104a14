"""Kvstore: the folder stays within its budget, what is used stays, and nothing outlives what it builds on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actors.kvstore.actor import SWEEP_S
from actors.kvstore.orphans import ABSENT_S
from actors.rules.location import Location, file_name
from bus.actor import Envelope
from bus.bus import BusError
from bus.memory_files import MemoryFiles, MemoryFolder
from bus.subjects import MAKE_ROOM, STORED, TOUCHED
from run.virtual import run_virtual
from schemas.cache import AdoptSlab, BlocksStored, BlocksTouched, MakeRoom
from schemas.failure import Code
from schemas.message import Role
from schemas.request import Taken
from tests.actors.shelf import ROOT, SLAB_BYTES, Cache, LossyBroker, Shelf, StandIn, cache, chain

QUIET_S = 12.0


def folder(*names: str) -> MemoryFolder:
    made = MemoryFolder()
    made.files = {name: bytearray(SLAB_BYTES) for name in names}
    return made


FULL = (file_name(0, "w0"), file_name(1, "w1"))


async def with_writers(world: Cache, num: int = 2) -> list[StandIn]:
    return [await world.with_writer(f"w{n}", Shelf(n)) for n in range(num)]


def kept(*writers: StandIn) -> set[bytes]:
    return {key for writer in writers for key, _ in writer.shelf.blocks.values()}


def is_closed(*writers: StandIn) -> bool:
    """No block is without its parent."""
    parents = {parent for writer in writers for _, parent in writer.shelf.blocks.values()}
    return parents <= kept(*writers) | {ROOT}


async def touch(world: Cache, keys: list[bytes]) -> None:
    await world.client.tell(TOUCHED.at(Role.ENTRYPOINT), BlocksTouched(keys=b"".join(keys)))


def test_there_are_as_many_files_as_the_budget_allows() -> None:
    async def main() -> None:
        async with cache() as world:
            files = folder()
            store = await world.with_kvstore("k0", files, 3 * SLAB_BYTES)
            for slab in range(3):
                assert await world.make_room("w0", 1)
                files.files[file_name(slab, "w0")] = bytearray(SLAB_BYTES)
            assert not await world.make_room("w0", 1)
            assert store.load().detail["stored_bytes"] == 3 * SLAB_BYTES
            del files.files[file_name(0, "w0")]
            assert await world.make_room("w0", 1)

    run_virtual(main())


def test_what_is_stored_is_what_is_there_and_what_was_allowed() -> None:
    async def main() -> None:
        async with cache() as world:
            files = folder(*FULL)
            store = await world.with_kvstore("k0", files, 4 * SLAB_BYTES)
            await asyncio.sleep(3.0)

            def stored() -> float:
                return store.load().detail["stored_bytes"] / SLAB_BYTES

            assert stored() == 2, "what it found"
            assert await world.make_room("w0", 1)
            assert stored() == 3
            files.files[file_name(2, "w0")] = bytearray(SLAB_BYTES)
            assert stored() == 3
            await asyncio.sleep(SWEEP_S + 3.0)
            assert stored() == 3
            files.files.clear()
            await asyncio.sleep(SWEEP_S + 3.0)
            assert stored() == 0

    run_virtual(main())


def test_a_folder_that_cannot_be_listed_is_the_askers_answer() -> None:
    async def main() -> None:
        async with cache() as world:
            store = await world.with_kvstore("k0", folder(), SLAB_BYTES)
            store._files.fail_next(OSError("gone"), "list")  # type: ignore[attr-defined]
            with pytest.raises(BusError) as caught:
                await world.client.ask(MAKE_ROOM.any(), MakeRoom(writer="w0", num_slots=1, slab_bytes=1), timeout_s=1)
            assert caught.value.code == Code.INTERNAL
            assert await world.make_room("w0", 1)

    run_virtual(main())


def test_old_leaves_go_first_and_what_is_used_stays_with_all_it_builds_on() -> None:
    async def main() -> None:
        async with cache() as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            writers = await with_writers(world)
            chains = [chain(f"{number}", 6) for number in range(5)]
            for keys in chains:  # every chain's blocks are in both writers, in turn
                for number, key in enumerate(keys):
                    await writers[number % 2].store([key], [ROOT, *keys][number])
                await asyncio.sleep(1.0)
            await touch(world, [chains[0][3]])
            await asyncio.sleep(1.0)
            assert not await world.make_room("w0", 3)
            await asyncio.sleep(1.0)
            assert kept(*writers) == {key for keys in (chains[0][:4], chains[1][:2], *chains[2:]) for key in keys}
            for step in range(8):
                assert not await world.make_room(f"w{step % 2}", 1)
                await asyncio.sleep(0.5)
                assert is_closed(*writers)
            assert set(chains[0][:4]) <= kept(*writers)
            await asyncio.sleep(QUIET_S)
            assert store.load().detail["blocks"] == len(kept(*writers))
            assert sum(len(writer.dropped) for writer in writers) == store.load().detail["reclaimed_blocks"]

    run_virtual(main())


@pytest.mark.parametrize("fates", ["l..", "d", "r.", "..lldr.r.d", "l"])
def test_lost_doubled_and_reordered_events_converge(fates: str) -> None:
    def is_hit(subject: str) -> bool:
        return subject.endswith((".writer.stored", ".writer.dropped", ".touched"))

    async def main() -> None:
        async with cache(LossyBroker(is_hit, fates)) as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            writers = await with_writers(world)
            for step in range(12):
                for writer in writers:
                    await writer.store(keys := chain(f"{writer.id} {step}", 5))
                    await touch(world, keys)
                await world.make_room(f"w{step % 2}", 3)
                await asyncio.sleep(0.7)
            await asyncio.sleep(QUIET_S)
            assert len(kept(*writers)) == store.load().detail["blocks"] > 10
            assert is_closed(*writers)
            await world.make_room("w0", 1000)
            await asyncio.sleep(1.0)
            assert kept(*writers) == set(), "every one of them was known, with its place"

    run_virtual(main())


def test_a_kvstore_that_is_killed_goes_on_with_what_the_writers_have() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            writers = await with_writers(world)
            for writer in writers:
                await writer.store(chain(writer.id, 10))
            await asyncio.sleep(1.0)
            world.kill("kvstore/k0")
            for writer in writers:
                await writer.store(chain(f"{writer.id} more", 10))
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            await asyncio.sleep(1.0)
            assert store.load().detail["blocks"] == 40 and not any(writer.dropped for writer in writers)
            await touch(world, [chain("w0", 10)[-1]])
            assert not await world.make_room("w0", 10)
            await asyncio.sleep(1.0)
            assert set(chain("w0", 10)) <= kept(*writers) and is_closed(*writers)
            assert len(writers[0].dropped) == 10

    run_virtual(main())


def test_room_waits_until_it_is_known_what_all_writers_have() -> None:
    """One writer's blocks build on another's."""

    async def main() -> None:
        async with cache() as world:
            one, two = await with_writers(world)
            keys = chain("a", 4)
            await one.store(keys[:2])
            await two.store(keys[2:], keys[1])
            two.dump_gate = asyncio.Event()
            await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            await asyncio.sleep(1.0)
            assert not await world.make_room("w0", 1)
            await asyncio.sleep(5.0)
            assert not one.dropped
            two.dump_gate.set()
            await asyncio.sleep(1.0)
            assert one.dropped == [keys[1]] and two.dropped == [keys[3], keys[2]]

    run_virtual(main())


def test_it_does_not_wait_for_ever_for_one_that_does_not_tell() -> None:
    async def main() -> None:
        async with cache() as world:
            one, two = await with_writers(world)
            await one.store(keys := chain("a", 3))
            two.dump_gate = asyncio.Event()
            await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            await asyncio.sleep(1.0)
            assert not await world.make_room("w0", 1)
            await asyncio.sleep(2 * QUIET_S)
            assert one.dropped == [keys[2]]
            assert not await world.make_room("w0", 1)
            await asyncio.sleep(1.0)
            assert one.dropped == [keys[2], keys[1]], "it has been waited for long enough, once for all"

    run_virtual(main())


def test_blocks_of_a_dead_writer_are_forgotten_and_come_back_with_it() -> None:
    async def main() -> None:
        async with cache() as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            one, two = await with_writers(world)
            await two.store(old := chain("old", 4))
            await asyncio.sleep(1.0)
            await one.store(chain("new", 4))
            await asyncio.sleep(1.0)
            world.kill("writer/w1")
            assert not await world.make_room("w0", 1)
            await asyncio.sleep(2 * QUIET_S)
            assert store.load().detail["blocks"] == 4 and not one.dropped
            await world.with_writer("w1", two.shelf)
            await asyncio.sleep(1.0)
            assert store.load().detail["blocks"] == 8 and set(old) <= kept(one, two)

    run_virtual(main())


def test_a_writer_that_was_not_told_to_free_blocks_is_asked_what_it_has() -> None:
    """It lives, and only the message was lost: its slots must not be lost with it."""

    async def main() -> None:
        fates = "lll" + 50 * "."
        async with cache(LossyBroker(lambda subject: subject.endswith(".drop"), fates)) as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            one, _ = await with_writers(world)
            await one.store(chain("a", 4))
            await asyncio.sleep(1.0)
            assert not await world.make_room("w0", 3)
            await asyncio.sleep(20.0)
            assert not one.dropped and store.load().detail["blocks"] == 4
            assert not await world.make_room("w0", 3)
            await asyncio.sleep(1.0)
            assert len(one.dropped) == 3 and store.load().detail["blocks"] == 1

    run_virtual(main())


def test_the_older_of_two_copies_is_dropped() -> None:
    async def main() -> None:
        async with cache() as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            one, two = await with_writers(world)
            await one.store(keys := chain("a", 3))
            await asyncio.sleep(1.0)
            await two.store(keys)
            await asyncio.sleep(1.0)
            assert sorted(one.dropped) == sorted(keys) and not two.dropped
            assert store.load().detail["duplicate_blocks"] == store.load().detail["blocks"] == 3

    run_virtual(main())


def test_when_all_is_wiped_nothing_is_known_and_there_is_room_again() -> None:
    async def main() -> None:
        async with cache() as world:
            files = folder(*FULL)
            store = await world.with_kvstore("k0", files, 2 * SLAB_BYTES)
            shard = await world.with_metadata("m0")
            writers = await with_writers(world)
            for writer in writers:
                await writer.store(chain(writer.id, 10))
            assert not await world.make_room("w0", 1)
            await asyncio.sleep(1.0)
            files.files.clear()
            for writer in writers:
                await writer.drop(list(writer.shelf.blocks))
            await asyncio.sleep(1.0)
            assert store.load().detail["blocks"] == shard.load().detail["blocks"] == 0
            assert await world.make_room("w0", 1) and await world.make_room("w1", 1)

    run_virtual(main())


def test_slabs_of_a_writer_that_is_gone_for_long_are_given_away() -> None:
    async def main() -> None:
        async with cache() as world:
            left = [file_name(8, "gone"), file_name(9, "gone")]
            store = await world.with_kvstore("k0", folder(*FULL, *left), 9 * SLAB_BYTES)
            writers = await with_writers(world)
            await asyncio.sleep(ABSENT_S - 10.0)
            assert not any(writer.adopted for writer in writers)
            await asyncio.sleep(40.0)
            assert {writer.adopted[0] for writer in writers} == set(left)
            assert store.load().detail["adopted_slabs"] >= 2

    run_virtual(main())


def test_a_writer_that_comes_back_meanwhile_keeps_what_was_not_given_away_yet() -> None:
    class Slow(StandIn):
        async def _on_adopt(self, adopt: AdoptSlab, envelope: Envelope) -> Taken:
            taken = await super()._on_adopt(adopt, envelope)
            await asyncio.sleep(10.0)
            return taken

    async def main() -> None:
        async with cache() as world:
            await world.with_kvstore("k0", folder(*FULL, file_name(3, "w1")), 9 * SLAB_BYTES)
            heir = Slow("w0", await world.bus("writer/w0"), await world.bulk("writer/w0"), Shelf(0))
            await world.add(heir)
            while not heir.adopted:
                await asyncio.sleep(1.0)
            await world.with_writer("w1", Shelf(1))
            await asyncio.sleep(60.0)
            assert len(heir.adopted) == 1

    run_virtual(main())


def test_what_is_over_the_budget_is_removed_and_not_given_away() -> None:
    """Each writer may have a slab, so writers that come and go would otherwise leave ever more."""

    async def main() -> None:
        async with cache() as world:
            left = [file_name(8, "gone"), file_name(9, "gone")]
            files = folder(*FULL, *left)
            store = await world.with_kvstore("k0", files, 3 * SLAB_BYTES)
            writers = await with_writers(world)
            shelf = Shelf(8)
            await (await world.with_writer("gone", shelf)).store(chain("a", 5))
            await asyncio.sleep(1.0)
            world.kill("writer/gone")
            assert store.load().detail["blocks"] == 5
            await asyncio.sleep(ABSENT_S + 30.0)
            assert files.files.keys() == {*FULL, left[1]}
            assert left[0] not in [name for writer in writers for name in writer.adopted]
            assert left[1] in [name for writer in writers for name in writer.adopted]
            assert store.load().detail["blocks"] == 0

    run_virtual(main())


def test_a_folder_that_is_slow_to_list_holds_up_nobody_but_who_asked() -> None:
    async def main() -> None:
        async with cache() as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            (writer,) = await with_writers(world, 1)
            await asyncio.sleep(0.1)
            files = store._files
            assert isinstance(files, MemoryFiles)
            hold = files.hold_next("list")
            asking = [asyncio.create_task(world.make_room(f"w{n}", 1)) for n in range(3)]
            await hold.is_reached.wait()
            await writer.store(chain("a", 2))
            await asyncio.sleep(1.0)
            assert store.load().detail["blocks"] == 2
            hold.is_released.set()
            assert await asyncio.gather(*asking) == [False, False, True], "that without any slab may have one"

    run_virtual(main())


def test_room_waits_for_the_writer_that_asks_to_be_known() -> None:
    """As after a restart of the kvstore: who asks first is not refused for that."""

    async def main() -> None:
        async with cache() as world:
            shelf = Shelf(0)
            for key in chain("a", 8):
                shelf.take(key, ROOT, approximate=False)
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            assert not await world.make_room("w0", 3)
            await asyncio.sleep(1.0)
            writer = await world.with_writer("w0", shelf)
            await asyncio.sleep(3.0)
            assert len(writer.dropped) == 3 and store.load().detail["blocks"] == 5

    run_virtual(main())


def test_events_that_make_no_sense_are_survived() -> None:
    async def main() -> None:
        async with cache() as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            (writer,) = await with_writers(world, 1)
            await asyncio.sleep(0.1)
            writer.seq += 1
            word = np.array([Location(0, 1).pack()], dtype="<u8").tobytes()
            event = BlocksStored(
                writer="w0", incarnation=writer.incarnation, seq=1, keys=b"k" * 16, parents=b"", locations=word
            )
            await world.client.tell(STORED.at(Role.WRITER), event)
            await world.client.tell(TOUCHED.at(Role.ENTRYPOINT), BlocksTouched(keys=b"half"))
            await writer.store(chain("a", 2))
            await asyncio.sleep(0.1)
            assert store.load().detail["blocks"] == 2

    run_virtual(main())


def test_a_burst_after_a_day_without_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.actor.HEARTBEAT_S", 5.0)  # a day of them is long; still within the time to be forgotten

    async def main() -> None:
        async with cache() as world:
            store = await world.with_kvstore("k0", folder(*FULL), 2 * SLAB_BYTES)
            shard = await world.with_metadata("m0")
            (writer,) = await with_writers(world, 1)
            words = await writer.store(keys := chain("a", 10))
            await asyncio.sleep(24 * 3600.0)
            assert writer.num_dumps == 2
            assert await world.found("m0", keys) == words
            for step in range(50):
                await writer.store(chain(f"{step}", 40))
            assert not await world.make_room("w0", 500)
            await asyncio.sleep(1.0)
            num = 10 + 50 * 40 - 500
            assert store.load().detail["blocks"] == shard.load().detail["blocks"] == len(kept(writer)) == num
            assert is_closed(writer)

    run_virtual(main())
