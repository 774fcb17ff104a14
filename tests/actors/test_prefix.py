"""A prompt whose beginning is cached: only the rest is computed, and the state is the same."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs

from actors.prefill import actor as prefill_actor
from actors.rules.chain import chain, link, root
from actors.rules.location import words
from bus.subjects import DESCRIBE
from kernels.engine import Chunk
from kernels.timed import TimedEngine
from run.virtual import run_virtual
from schemas.bulk import Handle
from schemas.cache import CachedPrefix, DescribeSpace
from schemas.vision import ImageEmbeddings
from tests.actors.core import VOCABULARY, info
from tests.actors.prefixes import BLOCK_BYTES, SLOW, SPACE, Stand, blocks, cold, stand, tokens

FIRST, SECOND = tokens(blocks(4) + 50), tokens(blocks(6) + 7)


class Counting(TimedEngine):
    """Notes which calls were made, and what each prefill step was given."""

    def __init__(self, **fields: int) -> None:
        super().__init__(info(max_tokens=4096, space=SPACE, **fields), VOCABULARY, SLOW)
        self.calls: list[str] = []
        self.steps: list[list[str]] = []

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        self.calls.append("prefill")
        self.steps.append([chunk.key for chunk in chunks])
        return await super().prefill(chunks)

    async def export(self, key: str) -> bytes:
        self.calls.append("export")
        return await super().export(key)

    async def blocks(self, key: str, first: int, num: int) -> list[bytes]:
        self.calls.append(f"blocks {first} {num}")
        return await super().blocks(key, first, num)

    async def windows(self, key: str, num_tokens: int) -> bytes | None:
        self.calls.append("windows")
        return await super().windows(key, num_tokens)

    def free(self, key: str) -> None:
        self.calls.append("free")
        super().free(key)


def test_the_next_turn_computes_its_new_tokens_only_and_its_state_is_that_of_a_cold_run() -> None:
    async def main() -> None:
        expected = await cold([FIRST, SECOND])
        async with stand() as system:
            assert await system.finish("r1", FIRST, system.cached(FIRST)) == expected[0]
            assert len(system.shelf.locations) == 4 and system.detail("stored_blocks") == 4
            assert sorted(system.directory.snapshots) == sorted(list(system.shelf.locations)[2:])
            computed = system.detail("computed_tokens")
            prefix = system.cached(SECOND)
            assert (prefix.num_blocks, [end for end, _ in prefix.snapshots]) == (4, [4, 3])
            assert await system.finish("r2", SECOND, prefix) == expected[1]
            assert system.detail("computed_tokens") - computed == len(SECOND) - blocks(4)
            assert system.detail("restored_tokens") == blocks(4)
            assert system.detail("replayed_tokens") == 0
            assert system.detail("read_bytes") == 4 * (BLOCK_BYTES + 64)
            assert 0 < system.detail("snapshot_bytes") < 200
            assert system.detail("stored_blocks") == 6
            assert not system.entry.shortened and not system.shelf.failed

    run_virtual(main())


def test_another_replica_restores_it_as_well() -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            await system.add_prefill("p1", TimedEngine(info(max_tokens=4096, space=SPACE), VOCABULARY))
            await system.finish("r1", FIRST, system.cached(FIRST))
            await system.send("r2", SECOND, system.cached(SECOND), to="p1")
            while "r2" not in system.sink.taken:
                await asyncio.sleep(0.001)
            assert system.sink.taken["r2"][1] == expected
            detail = system.actors["prefill/p1"].load().detail
            assert detail["computed_tokens"] == len(SECOND) - blocks(4) and detail["restored_tokens"] == blocks(4)

    run_virtual(main())


def test_the_same_prompt_again_stores_nothing_and_keeps_no_windows() -> None:
    async def main() -> None:
        async with stand() as system:
            state = await system.finish("r1", FIRST, system.cached(FIRST))
            kept = dict(system.directory.snapshots)
            prefix = system.cached(FIRST)
            assert (prefix.num_blocks, [end for end, _ in prefix.snapshots]) == (3, [3])
            assert await system.finish("r2", FIRST, prefix) == state
            assert system.detail("stored_blocks") == 4
            assert system.detail("computed_tokens") == len(FIRST) * 2 - blocks(3)
            assert system.directory.snapshots.keys() == kept.keys()

    run_virtual(main())


def test_the_end_of_the_chain_goes_to_decode() -> None:
    async def main() -> None:
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST, digests=b"d" * 16))
            await system.finish("r2", FIRST[:100], system.cached(FIRST[:100]))
            await system.finish("r3", FIRST, None)
            ends = [system.sink.taken[id][0].chain for id in ("r1", "r2", "r3")]
            keys = chain(root(SPACE), FIRST)
            assert ends[0] is not None and ends[1] is not None and ends[2] is None
            assert (ends[0].space, ends[0].key, ends[0].approximate) == (SPACE, keys[-1], False)
            assert ends[0].tokens == FIRST[blocks(4) :].tobytes() and ends[0].digests == b"d" * 16
            assert ends[1].key == root(SPACE) and ends[1].tokens == FIRST[:100].tobytes()
            longer = tokens(blocks(5))
            assert chain(root(SPACE), longer)[-1] == link(keys[-1], longer[blocks(4) :].tobytes())

    run_virtual(main())


def test_without_windows_the_last_block_is_replayed_and_all_that_follows_is_approximate() -> None:
    async def main() -> None:
        expected = await cold([SECOND])
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            prefix = system.cached(SECOND, snapshots=[])
            num_stored = len(system.shelf.stored)
            assert [await system.finish("r2", SECOND, prefix)] == expected
            assert not system.entry.shortened  # the entrypoint knew
            assert system.detail("restored_tokens") == blocks(4) and system.detail("replayed_tokens") == blocks(1)
            offer = system.sink.taken["r2"][0]
            assert offer.chain is not None and offer.chain.approximate
            new = system.shelf.stored[num_stored:]
            assert all(store.approximate for store in new)
            assert b"".join(store.keys for store in new) == prefix.keys[4 * 16 :]  # the replayed one is left as it is
            assert system.directory.snapshots[prefix.keys[-16:]].approximate

            third = tokens(blocks(8) + 1)
            prefix = system.cached(third)
            assert words(prefix.locations).tolist()[-1] & 1 and prefix.snapshots[0][1].approximate
            await system.finish("r3", third, prefix)
            assert not system.entry.shortened
            assert system.shelf.stored[-1].approximate and system.directory.snapshots[prefix.keys[-16:]].approximate

    run_virtual(main())


def test_an_exact_request_reads_nothing_and_takes_the_place_of_what_is_approximate() -> None:
    async def main() -> None:
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            await system.finish("r2", SECOND, system.cached(SECOND, snapshots=[]))
            prefix = system.cached(SECOND)
            assert prefix.num_blocks
            read_bytes, num_stored = system.detail("read_bytes"), len(system.shelf.stored)
            await system.finish("r3", SECOND, prefix, exact=True)
            assert system.detail("read_bytes") == read_bytes
            new = system.shelf.stored[num_stored:]
            assert b"".join(store.keys for store in new) == prefix.keys[4 * 16 :]
            assert not any(store.approximate for store in new)
            assert not system.directory.snapshots[prefix.keys[-16:]].approximate
            offer = system.sink.taken["r3"][0]
            assert offer.chain is not None and not offer.chain.approximate
            (told,) = system.entry.shortened["r3"]
            assert (told.num_blocks, told.start) == (0, 0)

    run_virtual(main())


def test_what_a_slot_says_of_itself_counts_more_than_its_location() -> None:
    """It was written again since the look-up, by a run that replayed."""

    async def main() -> None:
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            await system.finish("r2", SECOND, system.cached(SECOND, snapshots=[]))
            third = tokens(blocks(8) + 1)
            prefix = system.cached(third)
            exact = (words(prefix.locations) & ~np.uint64(1)).tobytes()
            snapshots = [(end, structs.replace(one, approximate=False)) for end, one in prefix.snapshots]
            await system.finish("r3", third, structs.replace(prefix, locations=exact, snapshots=snapshots))
            (told,) = system.entry.shortened["r3"]
            assert told.approximate
            assert system.shelf.stored[-1].approximate
            offer = system.sink.taken["r3"][0]
            assert offer.chain is not None and offer.chain.approximate

    run_virtual(main())


def test_few_engine_calls_and_the_state_leaves_before_anything_is_kept() -> None:
    async def main() -> None:
        engine = Counting()
        async with stand(engine) as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            engine.calls.clear()
            await system.finish("r2", tokens(blocks(6) + 7)[: blocks(5) + 9], system.cached(SECOND[: blocks(5) + 9]))
            assert engine.calls == ["prefill", "export", "blocks 4 1", "windows", "free"]
            engine.calls.clear()
            await system.finish("r3", FIRST, None)
            assert engine.calls == ["prefill"] * 3 + ["export", "free"]
            system.prefill.keeper._store._owners.forget("w0")
            other = tokens(blocks(2), seed=5)
            engine.calls.clear()
            await system.finish("r4", other, system.cached(other))
            assert engine.calls == ["prefill", "export", "free"]  # nobody stores: nothing is read

    run_virtual(main())


def test_the_windows_where_others_branch_off_cost_one_step_once_and_only_if_they_can_be_found() -> None:
    async def main() -> None:
        shared = tokens(blocks(5) + 9)
        prompts = [np.concatenate([shared, tokens(blocks(4), seed=seed)]) for seed in range(1, 5)]
        expected = await cold(prompts)
        engine = Counting(max_step_tokens=4096)

        async with stand(engine) as system:
            branches = [len(shared)]

            async def steps(number: int) -> int:
                engine.steps.clear()
                prefix = system.cached(prompts[number])
                state = await system.finish(f"r{number}", prompts[number], prefix, branches=branches)
                assert state == expected[number]
                return len(engine.steps)

            assert await steps(0) == 2
            ends = chain(root(SPACE), prompts[0])
            assert list(system.directory.snapshots) == [ends[4], ends[3], ends[8], ends[7]]
            assert await steps(1) == 1
            assert system.detail("restored_tokens") == blocks(5) and system.detail("replayed_tokens") == 0
            branches = []
            assert await steps(2) == 1
            branches = [len(shared)]
            for key in list(system.shelf.locations):
                del system.shelf.locations[key]
            system.prefill.keeper._store._owners.forget("w0")
            assert await steps(3) == 1  # nobody stores blocks

    run_virtual(main())


def test_a_prompt_that_is_cut_leaves_as_soon_as_it_would_and_its_windows_are_kept_behind_that() -> None:
    async def main() -> None:
        engine = Counting(max_step_tokens=4096)
        async with stand(engine) as system:
            prompt = tokens(blocks(6) + 5)
            engine.calls.clear()
            await system.finish("r1", prompt, system.cached(prompt), branches=[blocks(6) + 1])
            assert engine.calls == ["prefill", "export", "blocks 0 6", "windows", "windows", "free"]

    run_virtual(main())


def test_two_requests_share_blocks() -> None:
    async def main() -> None:
        third = np.concatenate([FIRST[: blocks(4)], tokens(300, seed=3)])
        expected = await cold([SECOND, third])
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            await system.send("r2", SECOND, system.cached(SECOND))
            await system.send("r3", third, system.cached(third))
            await system.send("r4", SECOND, system.cached(SECOND))
            await system.quiet()
            assert [system.sink.taken[id][1] for id in ("r2", "r3", "r4")] == [*expected, expected[0]]
            assert system.detail("restored_tokens") == 3 * blocks(4)

    run_virtual(main())


def test_images_and_a_hit() -> None:
    async def main() -> None:
        prompt = SECOND.copy()
        prompt[200:230] = prompt[blocks(4) + 100 : blocks(4) + 140] = 42
        handles = []
        states = []
        for is_warm in (False, True):
            async with stand() as system:
                bulk = system.bulks["decode/d0"]
                images = []
                for start, num, value in ((200, 30, b"\1"), (blocks(4) + 100, 40, b"\2")):
                    data = value * (4 * num)
                    handle: Handle = bulk.offer(data, lease_s=60, checksum=zlib.crc32(data), is_shared=True)
                    images.append(ImageEmbeddings(start=start, num_tokens=num, embeddings=handle))
                    handles.append(handle)
                if is_warm:
                    await system.finish("r1", prompt, system.cached(prompt), images=images)
                prefix = system.cached(prompt)
                states.append(await system.finish("r2", prompt, prefix, images=images))
                assert system.detail("restored_tokens") == (blocks(5) if is_warm else 0)
                assert not system.entry.shortened
        assert states[0] == states[1] != (await cold([prompt]))[0]

    run_virtual(main())


def test_a_slow_disk_delays_nobody_else_and_who_waited_for_it_keeps_its_place() -> None:
    async def main() -> None:
        engine = Counting(num_slots=1)
        expected = await cold([SECOND])
        async with stand(engine) as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            hold = system.disk.hold_next("read")
            await system.send("slow", SECOND, system.cached(SECOND))
            await hold.is_reached.wait()
            for id in ("a", "b", "c"):
                await system.send(id, tokens(300, seed=9), None)
            while "a" not in system.sink.taken:
                await asyncio.sleep(0.001)
            assert system.prefill.batch.num_load_bytes > 0
            hold.is_released.set()
            await system.quiet()
            assert system.sink.order == ["r1", "a", "b", "slow", "c"]  # the second had the engine by then
            assert system.sink.taken["slow"][1] == expected[0]
            assert not system.entry.shortened

    run_virtual(main())


def test_what_is_late_is_computed() -> None:
    async def main() -> None:
        expected = await cold([SECOND])
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            hold = system.disk.hold_next("read")
            started_s = asyncio.get_running_loop().time()
            assert [await system.finish("r2", SECOND, system.cached(SECOND))] == expected
            assert 4.9 < asyncio.get_running_loop().time() - started_s < 5.5
            (told,) = system.entry.shortened["r2"]
            assert (told.num_blocks, told.start, told.reason) == (0, 0, "block 0 of 4: late")
            assert not system.shelf.failed  # nobody knows that it is bad
            assert system.detail("restored_tokens") == 0 and system.detail("stored_blocks") == 6
            hold.is_released.set()

    run_virtual(main())


def test_what_is_loaded_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Counting(num_slots=1)
        async with stand(engine) as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            prefix = system.cached(SECOND)
            size = 4 * BLOCK_BYTES + prefix.snapshots[0][1].handle.size_bytes
            monkeypatch.setattr(prefill_actor, "LOAD_BYTES", 2 * size)
            most = 0
            for number in range(6):
                await system.send(f"s{number}", SECOND, prefix)
            while len(system.sink.taken) < 7:
                most = max(most, system.prefill.batch.num_load_bytes)
                await asyncio.sleep(0.0005)
            assert size < most <= 2 * size
            assert system.sink.order == ["r1", *(f"s{number}" for number in range(6))]
            monkeypatch.setattr(prefill_actor, "LOAD_BYTES", 1)
            await system.finish("large", SECOND, prefix)
            assert system.detail("restored_tokens") == 7 * blocks(4)
            await system.quiet()

    run_virtual(main())


@pytest.mark.parametrize("case", ["hit", "replay", "bad block", "bad windows"])
def test_cancel_at_every_await_leaves_nothing(case: str) -> None:
    async def one(num_turns: int) -> bool:
        """Cancel after so many turns of the loop. Whether it was there to be cancelled."""
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            prefix = damaged(system, case)
            await system.send("r2", SECOND, prefix)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            was_running = await system.cancel("r2")
            await system.quiet()
            assert system.balancer.num_released == 2
            await system.finish("r3", SECOND, system.cached(SECOND, num_blocks=0, snapshots=[]))
            return was_running

    num_turns = 0
    while run_virtual(one(num_turns)):
        num_turns += 1
    assert num_turns > 20


def damaged(system: Stand, case: str) -> CachedPrefix:
    """What is known of the second prompt, not all of it true."""
    prefix = system.cached(SECOND)
    if case == "replay":
        return structs.replace(prefix, snapshots=[])
    if case == "bad block":
        system.disk.flip(system.shelf.name, system.shelf.slab.offset(3) + 70)
    if case == "bad windows":
        system.prefill.keeper.snapshots._drop(prefix.snapshots[0][1].key)
    return prefix


def test_a_prefix_that_cannot_be_is_refused() -> None:
    async def main() -> None:
        async with stand() as system:
            await system.finish("r1", FIRST, system.cached(FIRST))
            prefix = system.cached(SECOND)
            for wrong in (
                {"keys": prefix.keys[:-1]},
                {"locations": prefix.locations[:-1]},
                {"num_blocks": 5},
                {"num_blocks": -1},
                {"root": b"short"},
            ):
                with pytest.raises(Exception, match="internal"):
                    await system.send("r2", SECOND, structs.replace(prefix, **wrong))
            await system.quiet()

    run_virtual(main())


def test_a_replica_says_which_blocks_it_understands() -> None:
    async def main() -> None:
        async with stand() as system:
            described = await system.entry.bus.ask(DESCRIBE.at("p0"), DescribeSpace(), timeout_s=1)
            assert described.space == SPACE

    run_virtual(main())
