"""Whatever of a cached beginning cannot be had: the state is the same, less is restored, and everyone who counts on
it hears of it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from actors.prefill.disk import HUNG_S, TELL_S, WINDOWS_S
from actors.prefill.job import Job
from actors.rules.location import SLOT_BITS, file_name, words
from actors.rules.slab import FREE, HEADER_BYTES
from bus.bus import Delivery
from bus.snapshots import SNAPSHOT_S
from bus.subjects import LOAD
from kernels import timed
from kernels.engine import Admission, Prefix, Sampling, StateError
from kernels.timed import TimedEngine
from run.virtual import run_virtual
from schemas.cache import BlocksFailed, CachedPrefix, HitShortened, Snapshot
from schemas.failure import Failure
from schemas.message import Role
from tests.actors.builders import pack_slot
from tests.actors.core import VOCABULARY, info
from tests.actors.prefixes import SLAB, SPACE, Stand, blocks, cold, stand, tokens

FIRST, SECOND = tokens(blocks(6) + 50), tokens(blocks(8) + 7)
"""The second goes on from the first: six blocks of it are cached, with their windows."""


async def warm(system: Stand) -> CachedPrefix:
    """The first prompt is computed; what is then known of the second."""
    await system.finish("r1", FIRST, system.cached(FIRST))
    prefix = system.cached(SECOND)
    assert (prefix.num_blocks, [end for end, _ in prefix.snapshots]) == (6, [6, 5])
    return prefix


def shortened(num_blocks: int, start: int, reason: str, *, approximate: bool = True) -> HitShortened:
    return HitShortened(
        request_id="r2", epoch=1, num_blocks=num_blocks, start=start, approximate=approximate, reason=reason
    )


def slot(system: Stand, number: int) -> int:
    return system.shelf.slab.offset(number)


def flip_payload(system: Stand, number: int) -> None:
    system.disk.flip(system.shelf.name, slot(system, number) + HEADER_BYTES + 5)


def flip_header(system: Stand, number: int) -> None:
    system.disk.flip(system.shelf.name, slot(system, number) + 20)


def other_block(system: Stand, number: int) -> None:
    """A whole one, whose key is another's: its slot was given to it since the look-up."""
    file, shelf = system.folder.files[system.shelf.name], system.shelf
    data = pack_slot(shelf.slab, b"o" * 16, b"p" * 16, b"x" * shelf.slab.payload_bytes, approximate=False)
    file[slot(system, number) : slot(system, number) + len(data)] = data


def freed(system: Stand, number: int) -> None:
    system.folder.files[system.shelf.name][slot(system, number) : slot(system, number) + HEADER_BYTES] = FREE


def later_writer(system: Stand, number: int) -> None:
    key, shelf = list(system.shelf.locations)[number], system.shelf
    data = pack_slot(replace(shelf.slab, epoch=9), key, b"p" * 16, b"x" * shelf.slab.payload_bytes, approximate=False)
    system.folder.files[shelf.name][slot(system, number) : slot(system, number) + len(data)] = data


def truncated(system: Stand, number: int) -> None:
    system.disk.truncate(system.shelf.name, slot(system, number) + 100)


BAD_BLOCKS: list[tuple[Callable[[Stand, int], None], str]] = [
    (flip_payload, "checksum"),
    (flip_header, "checksum"),
    (other_block, "key"),
    (freed, "free"),
    (later_writer, "epoch"),
    (truncated, "short"),
]


@pytest.mark.parametrize("number", [0, 1, 2, 5])
@pytest.mark.parametrize(("damage", "reason"), BAD_BLOCKS)
def test_a_bad_block_ends_what_is_restored(damage: Callable[[Stand, int], None], reason: str, number: int) -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            prefix = await warm(system)
            damage(system, number)
            num_stored = len(system.shelf.stored)
            assert await system.finish("r2", SECOND, prefix) == expected
            why = f"block {number} of 6: {reason}"
            if number == 5:  # the windows one block earlier are there, too
                assert system.entry.shortened["r2"] == [shortened(5, blocks(5), why, approximate=False)]
                assert system.detail("replayed_tokens") == 0
            elif number == 2:
                assert system.entry.shortened["r2"] == [shortened(2, blocks(1), why)]
                assert system.detail("replayed_tokens") == blocks(1)
            else:
                assert system.entry.shortened["r2"] == [shortened(0, 0, why, approximate=False)]
            assert system.detail("computed_tokens") == len(FIRST) + len(SECOND) - max(
                shortened.start for shortened in system.entry.shortened["r2"]
            )
            bad = [number] if damage is not truncated else list(range(number, 6))
            assert [failure.reason for failure in system.shelf.failed] == [reason]
            assert system.shelf.failed[0].keys == b"".join(list(system.shelf.locations)[n] for n in bad)
            assert [int(word) >> 25 for word in words(system.shelf.failed[0].locations)] == [SLAB] * len(bad)
            again = b"".join(store.keys for store in system.shelf.stored[num_stored:])
            assert again == b"".join([*(list(system.shelf.locations)[n] for n in bad), prefix.keys[6 * 16 :]])

    run_virtual(main())


def gone(system: Stand) -> None:
    system.disk.vanish()


def eio(system: Stand) -> None:
    system.disk.fail_next(OSError(errno.EIO, "broken"), "read")


def other_layout(system: Stand) -> None:
    slab = replace(system.shelf.slab, layout=b"o" * 16)
    system.folder.files[system.shelf.name][:HEADER_BYTES] = slab.pack()


def other_size(system: Stand) -> None:
    slab = replace(system.shelf.slab, payload_bytes=system.shelf.slab.payload_bytes - 1)
    system.folder.files[system.shelf.name][:HEADER_BYTES] = slab.pack()


def no_slab(system: Stand) -> None:
    system.folder.files[system.shelf.name][:HEADER_BYTES] = bytes(HEADER_BYTES)


def empty(system: Stand) -> None:
    system.disk.truncate(system.shelf.name, 0)


BAD_SLABS: list[tuple[Callable[[Stand], None], str]] = [
    (gone, "ENOENT"),
    (eio, "EIO"),
    (other_layout, "layout"),
    (other_size, "layout"),
    (no_slab, "magic"),
    (empty, "short"),
]


@pytest.mark.parametrize(("damage", "reason"), BAD_SLABS)
def test_a_slab_that_cannot_be_read_is_a_miss(damage: Callable[[Stand], None], reason: str) -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            prefix = await warm(system)
            damage(system)
            assert await system.finish("r2", SECOND, prefix) == expected
            why = f"block 0 of 6: {reason}"
            assert system.entry.shortened["r2"] == [shortened(0, 0, why, approximate=False)]
            failed = BlocksFailed(keys=prefix.keys[: 6 * 16], locations=prefix.locations, reason=reason)
            assert system.shelf.failed == [failed]

    run_virtual(main())


def test_a_slab_that_was_adopted_since_is_found_by_its_new_number() -> None:
    """Not by its old one, for which nobody looks through the folder again."""

    async def main() -> None:
        async with stand() as system:
            prefix = await warm(system)
            await system.finish("r2", SECOND, prefix)
            adopted = (words(prefix.locations) & np.uint64((1 << SLOT_BITS + 1) - 1)) | np.uint64(8 << SLOT_BITS + 1)
            await system.disk.rename(system.shelf.name, file_name(8, "w9"))
            system.disk.fail_next(OSError(errno.EIO, "not to be listed"), "list")
            await system.finish("r3", SECOND, prefix)
            assert [told.reason for told in system.entry.shortened["r3"]] == ["block 0 of 6: ENOENT"]
            system.disk.heal()
            await system.finish("r4", SECOND, structs.replace(prefix, locations=adopted.tobytes()))
            assert system.detail("restored_tokens") == 2 * blocks(6) and "r4" not in system.entry.shortened

    run_virtual(main())


def test_a_slot_number_past_the_slab_is_a_miss() -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            prefix = await warm(system)
            far = words(prefix.locations).copy()
            far[3] += np.uint64(1 << 20)
            assert await system.finish("r2", SECOND, structs.replace(prefix, locations=far.tobytes())) == expected
            assert system.entry.shortened["r2"] == [shortened(3, blocks(2), "block 3 of 6: short")]

    run_virtual(main())


def expired(system: Stand, snapshot: Snapshot) -> Snapshot:
    """Between look-up and pull."""
    system.prefill.keeper.snapshots._drop(snapshot.key)
    return snapshot


def stale(system: Stand, snapshot: Snapshot) -> Snapshot:
    handle = snapshot.handle
    return structs.replace(snapshot, handle=structs.replace(handle, generation=handle.generation + 1))


def unreachable(system: Stand, snapshot: Snapshot) -> Snapshot:
    return structs.replace(snapshot, handle=structs.replace(snapshot.handle, address="mem://99"))


def damaged(system: Stand, snapshot: Snapshot) -> Snapshot:
    handle = snapshot.handle
    return structs.replace(snapshot, handle=structs.replace(handle, checksum=handle.checksum ^ 1))


def of_another(system: Stand, snapshot: Snapshot) -> Snapshot:
    """The handle leads to windows of another block."""
    others = [other for key, other in system.directory.snapshots.items() if key != snapshot.key]
    return structs.replace(snapshot, handle=others[-1].handle)


BAD_SNAPSHOTS = [expired, stale, unreachable, damaged, of_another]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("damage", BAD_SNAPSHOTS)
def test_bad_windows_cost_a_block_and_nothing_else(damage: Callable[[Stand, Snapshot], Snapshot], both: bool) -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            prefix = await warm(system)
            first, second = prefix.snapshots
            found = [(first[0], damage(system, first[1])), second]
            if both:
                found[1] = (second[0], damage(system, second[1]))
            computed = system.detail("computed_tokens")
            assert await system.finish("r2", SECOND, structs.replace(prefix, snapshots=found)) == expected
            assert system.detail("computed_tokens") - computed == len(SECOND) - blocks(5)
            if both:
                assert system.entry.shortened["r2"] == [shortened(6, blocks(5), "no windows")]
                assert system.detail("replayed_tokens") == blocks(1) and system.detail("restored_tokens") == blocks(6)
            else:
                why = "windows behind block 5"
                assert system.entry.shortened["r2"] == [shortened(5, blocks(5), why, approximate=False)]
            assert not system.shelf.failed

    run_virtual(main())


def test_a_holder_that_does_not_answer_costs_a_block() -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            prefix = await warm(system)

            async def hang(snapshot: Snapshot) -> bytes | None:
                await asyncio.Event().wait()
                return None

            system.prefill.keeper.snapshots.pull = hang  # type: ignore[method-assign]
            started_s = asyncio.get_running_loop().time()
            assert await system.finish("r2", SECOND, prefix) == expected
            assert asyncio.get_running_loop().time() - started_s < WINDOWS_S + 0.1
            assert system.entry.shortened["r2"] == [shortened(6, blocks(5), "no windows")]

    run_virtual(main())


def test_windows_that_the_engine_does_not_take_cost_a_block() -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            prefix = await warm(system)
            snapshots = system.prefill.keeper.snapshots
            snapshots.clear()
            await snapshots.keep(prefix.snapshots[0][1].key, b"garbage", approximate=False)
            await asyncio.sleep(0.01)
            assert await system.finish("r2", SECOND, system.cached(SECOND)) == expected
            (told,) = system.entry.shortened["r2"]
            assert (told.num_blocks, told.start, told.approximate) == (6, blocks(5), True)
            assert system.detail("restored_tokens") == blocks(6) and system.detail("replayed_tokens") == blocks(1)

    run_virtual(main())


def test_blocks_that_the_engine_does_not_take_cost_the_whole_hit() -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        engine = TimedEngine(info(max_tokens=4096, space=SPACE), VOCABULARY)

        async def refuse(key: str, prefix: Prefix) -> int:
            raise StateError("not as they should be")

        async with stand(engine) as system:
            prefix = await warm(system)
            engine.resume = refuse  # type: ignore[method-assign]
            assert await system.finish("r2", SECOND, prefix) == expected
            told = [(one.num_blocks, one.start, one.approximate) for one in system.entry.shortened["r2"]]
            assert told == [(6, blocks(5), True), (0, 0, False)]
            chain = system.sink.taken["r2"][0].chain
            assert system.detail("restored_tokens") == 0 and chain is not None and not chain.approximate

    run_virtual(main())


def test_what_is_told_last_is_heard_last() -> None:
    async def main() -> None:
        async with stand() as system:
            prefix = await warm(system)
            snapshots = system.prefill.keeper.snapshots
            snapshots.clear()
            await snapshots.keep(prefix.snapshots[1][1].key, b"garbage", approximate=False)
            await asyncio.sleep(0.01)
            flip_payload(system, 5)
            system.entry.num_ignored = 1
            await system.finish("r2", SECOND, system.cached(SECOND))
            told = [(one.num_blocks, one.start, one.approximate) for one in system.entry.shortened["r2"]]
            assert told == [(5, blocks(5), False), (5, blocks(5), False), (5, blocks(4), True)]

    run_virtual(main())


def test_the_load_is_told_with_a_shortened_hit_for_it_is_more_than_was_reserved() -> None:
    async def main() -> None:
        async with stand() as system:
            prefix, reports = await warm(system), list[Delivery]()
            await system.entry.bus.wire.subscribe(LOAD.at(Role.PREFILL).name, reports.append)
            await system.finish("r2", SECOND, prefix)
            assert not reports
            flip_payload(system, 0)
            await system.finish("r3", SECOND, prefix)
            assert len(reports) == 1

    run_virtual(main())


def test_a_cancel_while_the_entrypoint_is_told_is_not_held_up() -> None:
    async def main() -> None:
        async with stand() as system:
            prefix = await warm(system)
            flip_payload(system, 0)
            system.entry.num_ignored = 99
            await system.send("r2", SECOND, prefix)
            while not system.prefill.load().detail["handing_over"]:
                await asyncio.sleep(0.001)
            started_s = asyncio.get_running_loop().time()
            assert await system.cancel("r2")
            await system.quiet()
            assert asyncio.get_running_loop().time() - started_s < TELL_S and "r2" not in system.sink.taken

    run_virtual(main())


def test_snapshots_are_over_after_a_while() -> None:
    async def main() -> None:
        async with stand() as system:
            prefix = await warm(system)
            await asyncio.sleep(SNAPSHOT_S + 1)
            await system.finish("r2", SECOND, prefix)
            assert system.entry.shortened["r2"] == [shortened(6, blocks(5), "no windows")]

    run_virtual(main())


def test_a_shortened_hit_is_told_until_it_is_heard_and_before_the_first_token() -> None:
    async def main() -> None:
        async with stand() as system:
            prefix = await warm(system)
            system.entry.num_ignored = 2
            await system.send("r2", SECOND, structs.replace(prefix, snapshots=[]))
            prefix = structs.replace(prefix, snapshots=[(6, stale(system, prefix.snapshots[0][1]))])
            await system.send("r3", SECOND, prefix)
            while not len(system.entry.shortened.get("r3", [])) == 3:
                assert "r3" not in system.sink.taken
                await asyncio.sleep(0.01)
            assert "r2" not in system.entry.shortened  # it was planned that way
            assert system.detail("computed_tokens") == len(FIRST) + 2 * (len(SECOND) - blocks(5))
            await system.quiet()
            assert "r3" in system.sink.taken

    run_virtual(main())


def test_without_an_entrypoint_the_request_goes_on() -> None:
    async def main() -> None:
        async with stand() as system:
            prefix = await warm(system)
            system.entry.num_ignored = 99
            await system.finish("r2", SECOND, structs.replace(prefix, snapshots=[(6, prefix.snapshots[1][1])]))
            assert len(system.entry.shortened["r2"]) == 3

    run_virtual(main())


def test_another_space_is_neither_read_nor_stored() -> None:
    async def main() -> None:
        (expected,) = await cold([SECOND])
        async with stand() as system:
            prefix = await warm(system)
            num_stored = system.detail("stored_blocks")
            assert await system.finish("r2", SECOND, structs.replace(prefix, space="other")) == expected
            assert system.detail("read_bytes") == 0 and system.detail("stored_blocks") == num_stored
            assert system.sink.taken["r2"][0].chain is None
            (told,) = system.entry.shortened["r2"]
            assert (told.num_blocks, told.start, told.approximate) == (0, 0, False)

    run_virtual(main())


def test_the_engine_would_show_a_wrong_block() -> None:
    """The state is another when a block that is not the right one is restored: so the tests above can fail."""

    async def main() -> None:
        (expected,) = await cold([SECOND])
        engine = TimedEngine(info(max_tokens=4096, space=SPACE), VOCABULARY)
        resume = engine.resume

        async def swapped(key: str, prefix: Prefix) -> int:
            wrong = [*prefix.payloads[1:], prefix.payloads[0]]
            return await resume(key, replace(prefix, payloads=wrong))

        async with stand(engine) as system:
            prefix = await warm(system)
            engine.resume = swapped  # type: ignore[method-assign]
            assert await system.finish("r2", SECOND, prefix) != expected

    run_virtual(main())


def test_a_model_with_longer_windows_restores_less_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "_WINDOW", 256)

    async def main() -> None:
        short, long = tokens(blocks(7) + 7), tokens(blocks(9) + 7)
        expected = await cold([short, long])
        async with stand() as system:
            await warm(system)
            assert await system.finish("r3", short, system.cached(short)) == expected[0]
            told = system.entry.shortened["r3"][-1]
            assert (told.num_blocks, told.start, told.approximate) == (0, 0, False)
            prefix = system.cached(long)
            system.prefill.keeper.snapshots.clear()
            assert await system.finish("r2", long, prefix) == expected[1]
            told, num_blocks = system.entry.shortened["r2"][-1], prefix.num_blocks
            assert (told.num_blocks, told.start, told.approximate) == (num_blocks, blocks(num_blocks) - 256, True)

    run_virtual(main())


def test_a_prompt_that_never_fits_and_is_cancelled_while_that_is_told_leaves_once() -> None:
    class Small(TimedEngine):
        def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
            return Admission.NEVER

    async def main() -> None:
        async with stand(Small(info(max_tokens=4096, space=SPACE), VOCABULARY)) as system:
            tell = system.prefill._fail

            async def cancelled_meanwhile(job: Job, failure: Failure) -> None:
                await tell(job, failure)
                assert await system.cancel(job.id)

            system.prefill._fail = cancelled_meanwhile  # type: ignore[method-assign]
            await system.send("r1", FIRST, system.cached(FIRST))
            await system.quiet()
            assert system.balancer.num_released == len(system.entry.failed) == 1
            system.entry.failed.clear()

    run_virtual(main())


def test_a_folder_that_hangs_is_left_alone_for_a_while() -> None:
    async def main() -> None:
        async with stand() as system:
            prefix = await warm(system)
            hold = system.disk.hold_next("read")
            await system.finish("r2", SECOND, prefix)
            assert system.entry.shortened["r2"][0].reason == "block 0 of 6: late"
            started_s, read_bytes = asyncio.get_running_loop().time(), system.detail("read_bytes")
            await system.finish("r3", SECOND, prefix)
            assert asyncio.get_running_loop().time() - started_s < 0.1
            assert system.detail("read_bytes") == read_bytes and system.detail("restored_tokens") == 0
            assert system.entry.shortened["r3"][0].reason == "block 0 of 6: late"
            await asyncio.sleep(HUNG_S)
            await system.finish("r4", SECOND, prefix)
            assert system.detail("restored_tokens") == blocks(6) and "r4" not in system.entry.shortened
            hold.is_released.set()

    run_virtual(main())
