"""Metadata shards: what they tell is what the writers have, whatever becomes of messages, shards and writers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actors.metadata.shard import Shard
from actors.rules import keys as block_keys
from actors.rules.location import Location
from bus.bus import BusError
from bus.subjects import EXITED, FAILED, FIND, KEPT, STORED
from run.virtual import run_virtual
from schemas.cache import BlocksFailed, BlocksStored, FindBlocks, SnapshotsKept
from schemas.failure import Code
from schemas.liveness import ProcessExited
from schemas.message import Role
from tests.actors.shelf import LossyBroker, Shelf, StandIn, cache, chain, snapshot

QUIET_S = 12.0
"""Some heartbeats, and the time in which the silent are forgotten."""


def told(writer: StandIn) -> dict[bytes, int]:
    return {key: word for word, (key, _) in writer.shelf.blocks.items()}


def is_event(subject: str) -> bool:
    return subject.endswith((".writer.stored", ".writer.dropped"))


def test_blocks_are_found_up_to_the_first_that_is_missing() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            writer = await world.with_writer("w0", Shelf(7))
            keys = chain("a", 6)
            words = await writer.store(keys[:4])
            await writer.drop([words[1]])
            await asyncio.sleep(QUIET_S)
            found = await world.find("m0", keys)
            assert np.frombuffer(found.locations, "<u8").tolist() == words[:1] and found.snapshots == []
            found = await world.find("m0", [keys[2], keys[3], keys[4]])
            assert np.frombuffer(found.locations, "<u8").tolist() == words[2:]
            assert (await world.find("m0", [])).locations == b""
            with pytest.raises(BusError) as caught:
                await world.client.ask(FIND.at("m0"), FindBlocks(keys=b"half of one"), timeout_s=1)
            assert caught.value.code == Code.BAD_REQUEST

    run_virtual(main())


@pytest.mark.parametrize("fates", ["l..", "d", "r.", "..lldr.r.d", ".......l", "l"])
def test_lost_doubled_and_reordered_events_converge(fates: str) -> None:
    async def main() -> None:
        async with cache(LossyBroker(is_event, fates)) as world:
            shard = await world.with_metadata("m0")
            writers = [await world.with_writer(f"w{n}", Shelf(n)) for n in range(2)]
            keys = [chain(f"{n}", 40) for n in range(2)]
            for step in range(10):
                for writer, mine in zip(writers, keys, strict=True):
                    await writer.store(mine[4 * step : 4 * step + 4])
                    if step % 3 == 2:
                        await writer.drop(list(writer.shelf.blocks)[:5])
                await asyncio.sleep(0.7)
            await asyncio.sleep(QUIET_S)
            for writer, mine in zip(writers, keys, strict=True):
                assert await world.found("m0", mine) == [told(writer).get(key, -1) for key in mine]
            assert shard.load().detail["blocks"] == sum(len(writer.shelf.blocks) for writer in writers)

    run_virtual(main())


def test_events_in_order_cost_no_dump() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            writer = await world.with_writer("w0", Shelf(7))
            await asyncio.sleep(QUIET_S)
            for step in range(20):
                await writer.store(chain(f"{step}", 3))
                await asyncio.sleep(1.0)
            assert writer.num_dumps == 1

    run_virtual(main())


def test_a_shard_that_is_killed_is_rebuilt_from_the_writers() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            writer = await world.with_writer("w0", Shelf(7))
            keys = chain("a", 20_000)  # more than fits in a message
            words = await writer.store(keys[:50])
            for start in range(50, len(keys), 2000):
                words += await writer.store(keys[start : start + 2000])
            await asyncio.sleep(1)
            world.kill("metadata/m0")
            await writer.drop(words[-3:])
            await asyncio.sleep(1)
            shard = await world.with_metadata("m0")
            await asyncio.sleep(1)
            found = await world.find("m0", keys[-8000:])
            assert np.frombuffer(found.locations, "<u8").tolist() == words[-8000:-3]
            assert shard.load().detail["blocks"] == len(keys) - 3

    run_virtual(main())


def test_a_writer_that_comes_back_with_less_is_told_of_no_more() -> None:
    """And what it has while it is gone can still be read."""

    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            shelf, other = Shelf(7), await world.with_writer("w1", Shelf(8))
            writer = await world.with_writer("w0", shelf)
            keys, others = chain("a", 8), chain("b", 8)
            await other.store(others)
            words = await writer.store(keys)
            await asyncio.sleep(1)
            world.kill("writer/w0")
            await asyncio.sleep(QUIET_S)
            assert await world.found("m0", keys) == words
            for word in words[5:]:
                del shelf.blocks[word]
            shelf.slabs = {9}  # its old slab is not even mentioned
            await world.with_writer("w0", shelf)
            await asyncio.sleep(1)
            assert await world.found("m0", keys) == [*words[:5], -1, -1, -1]
            assert await world.found("m0", others) == list(other.shelf.blocks)

    run_virtual(main())


def test_a_slab_that_was_adopted_is_not_the_old_writers_to_lose() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            old, new = Shelf(7), Shelf(8)
            writer = await world.with_writer("w0", old)
            keys = chain("a", 4)
            await writer.store(keys)
            await asyncio.sleep(1)
            world.kill("writer/w0")
            heir = await world.with_writer("w1", new)
            new.blocks, old.blocks = old.blocks, {}
            new.slabs, old.slabs = {7, 8}, {9}
            new.next_slot = 100
            await asyncio.sleep(1)
            await heir.store(chain("b", 1))
            await asyncio.sleep(QUIET_S)
            await world.with_writer("w0", old)
            await asyncio.sleep(QUIET_S)
            assert -1 not in await world.found("m0", keys)

    run_virtual(main())


def test_a_drop_of_another_copy_takes_nothing_away() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            one, two = [await world.with_writer(f"w{n}", Shelf(n)) for n in range(2)]
            keys = chain("a", 3)
            before = await one.store(keys)
            await asyncio.sleep(0.1)
            after = await two.store(keys)
            await asyncio.sleep(0.1)
            await one.drop(before)
            await asyncio.sleep(0.1)
            assert await world.found("m0", keys) == after

    run_virtual(main())


def test_an_approximate_copy_does_not_hide_an_exact_one() -> None:
    shard, keys = Shard("m0"), block_keys.keys(b"".join(chain("a", 2)))
    exact = np.array([Location(1, 1).pack(), Location(1, 2).pack()], dtype=np.uint64)
    worse = np.array([Location(2, slot, approximate=True).pack() for slot in (1, 2)], dtype=np.uint64)
    shard.put(keys[:1], exact[:1])
    shard.put(keys, worse)
    assert shard.find(keys).tolist() == [exact[0], worse[1]]
    shard.put(keys, exact)
    assert shard.find(keys).tolist() == exact.tolist()


def test_shards_share_out_the_keys_and_only_those_of_who_joins_or_leaves_move() -> None:
    async def main() -> None:
        async with cache() as world:
            shards = {"m0": await world.with_metadata("m0")}
            writer = await world.with_writer("w0", Shelf(7))
            keys = chain("a", 300)
            words = await writer.store(keys)
            await asyncio.sleep(1)

            async def spread(members: list[str]) -> dict[str, set[bytes]]:
                number = block_keys.owners(block_keys.keys(b"".join(keys)), members)
                parts = {id: {key for key, n in zip(keys, number, strict=True) if members[n] == id} for id in members}
                for id in members:
                    found = await world.found(id, keys)
                    assert found == [word if key in parts[id] else -1 for key, word in zip(keys, words, strict=True)]
                    assert shards[id].load().detail["blocks"] == len(parts[id])
                return parts

            await spread(["m0"])
            shards["m1"] = await world.with_metadata("m1")
            await asyncio.sleep(QUIET_S)
            two = await spread(["m0", "m1"])
            num_dumps = writer.num_dumps
            shards["m2"] = await world.with_metadata("m2")
            await asyncio.sleep(QUIET_S)
            three = await spread(["m0", "m1", "m2"])
            assert three["m0"] < two["m0"] and three["m1"] < two["m1"]
            assert writer.num_dumps - num_dumps <= 2, "those that only lose keys ask for nothing"
            words += await writer.store(more := chain("b", 50))
            keys += more
            await asyncio.sleep(1)
            await spread(["m0", "m1", "m2"])
            world.kill("metadata/m1")
            await asyncio.sleep(QUIET_S)
            left = await spread(["m0", "m2"])
            assert left["m0"] > three["m0"] and left["m2"] > three["m2"]

    run_virtual(main())


def test_a_shard_that_is_known_to_have_ended_is_replaced_at_once() -> None:
    async def main() -> None:
        async with cache() as world:
            for id in ("m0", "m1"):
                await world.with_metadata(id)
            writer = await world.with_writer("w0", Shelf(7))
            words = await writer.store(keys := chain("a", 50))
            await asyncio.sleep(1)
            world.kill("metadata/m1")
            exited = ProcessExited(name="front", pid=1, members=["metadata/m1"])
            await world.client.tell(EXITED.all(), exited)
            await asyncio.sleep(0.5)
            assert await world.found("m0", keys) == words

    run_virtual(main())


def test_blocks_dropped_while_a_dump_is_on_its_way_stay_dropped() -> None:
    async def main() -> None:
        async with cache() as world:
            writer = await world.with_writer("w0", Shelf(7))
            words = await writer.store(keys := chain("a", 4))
            writer.dump_gate = asyncio.Event()
            await world.with_metadata("m0")
            await asyncio.sleep(0.1)
            await writer.drop(words[2:])
            await asyncio.sleep(0.1)
            assert await world.found("m0", keys) == [-1] * 4
            writer.dump_gate.set()
            await asyncio.sleep(0.1)
            assert await world.found("m0", keys) == [*words[:2], -1, -1]

    run_virtual(main())


def test_members_that_change_during_a_dump_mean_one_more() -> None:
    async def main() -> None:
        async with cache() as world:
            writer = await world.with_writer("w0", Shelf(7))
            words = await writer.store(keys := chain("a", 60))
            await world.with_metadata("m1")
            await asyncio.sleep(0.1)
            writer.dump_gate = asyncio.Event()
            await world.with_metadata("m0")  # it asks for its share of two
            await asyncio.sleep(0.1)
            world.kill("metadata/m1")
            await asyncio.sleep(QUIET_S)
            writer.dump_gate.set()
            await asyncio.sleep(QUIET_S)
            assert await world.found("m0", keys) == words

    run_virtual(main())


def test_a_writer_that_was_forgotten_during_its_dump_is_not_asked_for_another_meanwhile() -> None:
    """Two of them taken over at once would leave blocks of the older one behind."""

    async def main() -> None:
        async with cache() as world:
            writer = await world.with_writer("w0", Shelf(7))
            words = await writer.store(keys := chain("a", 4))
            writer.dump_gate = asyncio.Event()
            shard = await world.with_metadata("m0")
            await asyncio.sleep(0.1)
            shard._writers.exited(["w0"])
            shard.wake()
            await asyncio.sleep(QUIET_S)  # it is heard of again
            assert writer.num_dumps == 1
            await writer.drop(words[2:])
            writer.dump_gate.set()
            await asyncio.sleep(QUIET_S)
            assert await world.found("m0", keys) == [*words[:2], -1, -1]

    run_virtual(main())


def test_a_dump_that_fails_or_makes_no_sense_is_asked_for_again() -> None:
    async def main() -> None:
        async with cache() as world:
            writer = await world.with_writer("w0", Shelf(7))
            words = await writer.store(keys := chain("a", 4))
            writer.bad_dumps = ["refused", "short", "slabs"]
            await world.with_metadata("m0")
            await asyncio.sleep(0.1)
            assert await world.found("m0", keys) == [-1] * 4
            await asyncio.sleep(QUIET_S)
            assert await world.found("m0", keys) == words and writer.num_dumps == 4

    run_virtual(main())


def test_blocks_that_cannot_be_read_are_forgotten_where_no_writer_looks_after_them() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            writers = [await world.with_writer(f"w{n}", Shelf(n)) for n in range(2)]
            keys = chain("a", 4)
            words = [*await writers[0].store(keys[:2]), *await writers[1].store(keys[2:])]
            await asyncio.sleep(1)
            world.kill("writer/w1")
            await asyncio.sleep(QUIET_S)
            failed = BlocksFailed(
                keys=b"".join(keys[:3]), locations=np.array(words[:3], dtype="<u8").tobytes(), reason="gone"
            )
            await world.client.tell(FAILED.at(Role.PREFILL), failed)
            await asyncio.sleep(0.1)
            assert await world.found("m0", keys) == [words[0], words[1], -1, words[3]]

    run_virtual(main())


def test_events_that_make_no_sense_are_survived() -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            writer = await world.with_writer("w0", Shelf(7))
            await asyncio.sleep(0.1)
            writer.seq += 1
            event = BlocksStored(
                writer="w0", incarnation=writer.incarnation, seq=1, keys=b"x" * 16, parents=b"", locations=b"y"
            )
            await world.client.tell(STORED.at(Role.WRITER), event)
            await world.client.tell(FAILED.at(Role.PREFILL), BlocksFailed(keys=b"xy", locations=b"y", reason="none"))
            await world.client.tell(KEPT.at("m0"), SnapshotsKept(snapshots=[snapshot(b"half"), snapshot(b"")]))
            await world.with_metadata("m1")
            await asyncio.sleep(0.1)
            world.kill("metadata/m1")
            await asyncio.sleep(QUIET_S)
            words = await writer.store(keys := chain("a", 2))
            await asyncio.sleep(0.1)
            assert await world.found("m0", keys) == words

    run_virtual(main())
