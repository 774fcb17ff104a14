"""Blocks on their way to writers: never waited for, and lost rather than retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.rules.owner import EXPIRY_S
from actors.rules.ring import Ring
from bus.blocks import BATCH_BLOCKS, BATCH_BYTES, MAX_MESSAGES, STORE_S, BlockStore
from bus.bulk import INLINE_BYTES, MemoryBulk
from run.virtual import run_virtual
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from tests.bus.members import FakeWriter, Place, load, place

SIZE = 1000
FULL = Failure(code=Code.OVERLOADED, message="the disk is full")


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def payload(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(2, "little") * (size // 2)


class Stage:
    """A block store, and the writers it knows."""

    def __init__(self, here: Place, store: BlockStore, bulk: MemoryBulk, writers: list[FakeWriter]) -> None:
        self.here = here
        self.store = store
        self.bulk = bulk
        self.writers = writers

    def put(self, owner: str, first: int, num: int, *, approximate: bool = False, size: int = SIZE) -> bool:
        """Blocks `first` to `first + num - 1` of a chain that all requests here share."""
        numbers = range(first, first + num)
        keys, parents = [key(number + 1) for number in numbers], [key(number) for number in numbers]
        payloads = [payload(number, size) for number in numbers]
        return self.store.store(owner, "s", keys, parents, payloads, approximate=approximate)

    async def quiet(self) -> None:
        while self.store.num_bytes:
            await asyncio.sleep(0.1)

    @property
    def blocks(self) -> dict[bytes, tuple[bytes, bytes, bool]]:
        return {key: block for writer in self.writers for key, block in writer.blocks.items()}

    @property
    def counts(self) -> tuple[int, int]:
        return self.store.num_stored, self.store.num_lost

    def exit(self, id: str) -> None:
        self.store.on_exited(ProcessExited(name="node", pid=1, members=[f"writer/{id}", "decode/d0"]))


@asynccontextmanager
async def stage(num_writers: int = 1, max_bytes: int = 1 << 20, **bulk: int) -> AsyncIterator[Stage]:
    async with place() as here:
        ours = await here.bulk(**bulk)
        store = BlockStore(await here.bus(), ours, Ring(), here.spawn, max_bytes)
        writers = [FakeWriter(here, f"w{number}") for number in range(num_writers)]
        for writer in writers:
            await writer.start()
            store.on_load(load(Role.WRITER, writer.id))
        yield Stage(here, store, ours, writers)
        await asyncio.sleep(0)
        assert ours.num_offers == 0


def run(work: Coroutine[Any, Any, None]) -> None:
    run_virtual(work)


def test_what_is_stored_arrives_whole_at_its_owner() -> None:
    async def main() -> None:
        async with stage(num_writers=3) as system:
            assert system.put("r1", 0, 200) and system.put("r2", 200, 50, approximate=True)
            await system.quiet()
            expected = {key(n + 1): (key(n), payload(n), n >= 200) for n in range(250)}
            assert system.blocks == expected and system.counts == (250, 0)
            assert sum(len(writer.blocks) for writer in system.writers) == 250
            assert all(len(writer.blocks) > 50 for writer in system.writers)
            owners = system.store._owners.of(sorted(expected), asyncio.get_running_loop().time())
            assert all(
                name in system.writers[int(owner[1])].blocks
                for name, owner in zip(sorted(expected), owners, strict=True)
            )
            assert {message.space for writer in system.writers for message in writer.messages} == {"s"}

    run(main())


def test_a_burst_becomes_few_messages_of_one_kind_each() -> None:
    async def main() -> None:
        async with stage() as system:
            (writer,) = system.writers
            for number in range(3 * BATCH_BLOCKS):
                system.put(f"r{number}", number, 1)
            system.put("other", 900, 1, approximate=True)
            system.put("smaller", 901, 1, size=SIZE // 2)
            await system.quiet()
            assert [len(message.keys) // 16 for message in writer.messages] == [BATCH_BLOCKS] * 3 + [1, 1]
            assert system.counts == (3 * BATCH_BLOCKS + 2, 0) and not system.store.is_failed("other")

    run(main())


def test_a_message_carries_only_so_many_bytes() -> None:
    async def main() -> None:
        async with stage(max_bytes=1 << 30) as system:
            (writer,) = system.writers
            system.put("r1", 0, 5, size=BATCH_BYTES // 2)
            system.put("r1", 5, 1, size=BATCH_BYTES * 2)
            await system.quiet()
            assert [len(message.keys) // 16 for message in writer.messages] == [2, 2, 1, 1]
            assert system.counts == (6, 0) and len(system.blocks[key(6)][1]) == 2 * BATCH_BYTES

    run(main())


def test_only_so_many_messages_are_under_way_to_a_writer() -> None:
    async def main() -> None:
        async with stage(num_writers=2) as system:
            silent, other = system.writers
            silent.is_silent = True
            system.put("r1", 0, 20 * BATCH_BLOCKS // 2)
            await asyncio.sleep(STORE_S / 2)
            assert len(silent.messages) == MAX_MESSAGES
            assert len(other.blocks) > 200  # who is behind does not hold up the others

    run(main())


def test_what_does_not_fit_is_lost_at_once_and_its_request_stores_no_more() -> None:
    async def main() -> None:
        async with stage(max_bytes=10 * SIZE) as system:
            assert system.put("r1", 0, 10)
            assert system.store.num_bytes == 10 * SIZE
            assert not system.put("r2", 10, 1) and system.store.is_failed("r2") and not system.store.is_failed("r1")
            await system.quiet()
            assert system.counts == (10, 1)
            assert not system.put("r2", 11, 1)  # there is room, but its parent is not there
            assert system.put("r1", 10, 1)
            system.store.forget("r2")
            assert not system.store.is_failed("r2") and system.put("r2", 10, 1)
            await system.quiet()
            assert system.counts == (12, 2)

    run(main())


def test_without_writers_nothing_is_stored() -> None:
    async def main() -> None:
        async with stage(num_writers=0) as system:
            assert not system.put("r1", 0, 3)
            assert system.counts == (0, 3) and system.store.is_failed("r1")

    run(main())


def test_writers_come_and_go_with_their_reports() -> None:
    async def main() -> None:
        async with stage(num_writers=1) as system:
            assert system.put("r1", 0, 1)
            await system.quiet()
            await asyncio.sleep(EXPIRY_S + 1)
            assert not system.put("r2", 1, 1)
            system.store.on_load(load(Role.WRITER, "w0"))
            assert system.put("r3", 1, 1)
            await system.quiet()
            system.store.on_load(load(Role.WRITER, "w0", is_accepting=False))
            assert not system.put("r4", 2, 1)
            assert system.counts == (2, 2)

    run(main())


@pytest.mark.parametrize("size", [SIZE, INLINE_BYTES])
@pytest.mark.parametrize("trouble", ["refusal", "silence", "nobody", "exit", "restart"])
def test_whatever_goes_wrong_costs_the_blocks_and_nothing_else(size: int, trouble: str) -> None:
    async def main() -> None:
        async with stage(max_bytes=1 << 30) as system:
            (writer,) = system.writers
            if trouble == "refusal":
                writer.failure = FULL
            elif trouble == "nobody":
                writer.end()
            else:
                writer.is_silent = True
            num = MAX_MESSAGES * BATCH_BLOCKS + 7
            assert system.put("r1", 0, num, size=size)
            await asyncio.sleep(1)
            assert len(writer.messages) <= MAX_MESSAGES + 1
            if trouble == "exit":
                system.exit("w0")
            elif trouble == "restart":
                system.store.on_load(load(Role.WRITER, "w0", "b"))
            start_s = asyncio.get_running_loop().time()
            await system.quiet()
            waited_s = asyncio.get_running_loop().time() - start_s
            assert waited_s == pytest.approx(STORE_S - 1, abs=0.2) if trouble == "silence" else waited_s < 1
            assert system.counts == (0, num) and system.store.is_failed("r1") and system.bulk.num_offers == 0
            assert not system.put("r1", num, 1)
            # the next request is served as if nothing had been
            writer.failure, writer.is_silent = None, False
            if trouble in ("nobody", "exit"):
                await writer.start()
            system.store.on_load(load(Role.WRITER, "w0", "b"))
            assert system.put("r2", 0, 5)
            await system.quiet()
            assert system.counts == (5, num + 1) and not system.store.is_failed("r2")

    run(main())


def test_a_writer_that_is_back_at_once_is_sent_to_at_once() -> None:
    async def main() -> None:
        async with stage() as system:
            (writer,) = system.writers
            writer.is_silent = True
            system.put("r1", 0, MAX_MESSAGES * BATCH_BLOCKS)
            await asyncio.sleep(1)
            writer.is_silent = False
            system.store.on_load(load(Role.WRITER, "w0", "b"))
            assert system.put("r2", 0, 1)
            await asyncio.sleep(1)
            assert system.counts == (1, MAX_MESSAGES * BATCH_BLOCKS)

    run(main())


@pytest.mark.parametrize("num_turns", range(20))
def test_what_comes_when_the_last_message_is_answered_is_sent(num_turns: int) -> None:
    async def main() -> None:
        async with stage() as system:
            for number in range(MAX_MESSAGES):
                system.put(f"r{number}", number * BATCH_BLOCKS, BATCH_BLOCKS)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            system.put("late", 900, 1)
            await asyncio.sleep(STORE_S / 2)
            assert system.counts == (MAX_MESSAGES * BATCH_BLOCKS + 1, 0)

    run(main())


def test_what_waits_of_a_request_that_lost_a_block_is_not_sent() -> None:
    async def main() -> None:
        async with stage() as system:
            (writer,) = system.writers
            writer.failure = FULL
            system.put("r1", 0, BATCH_BLOCKS * (MAX_MESSAGES + 5))
            system.put("r2", 900, 1)
            await system.quiet()
            assert system.counts == (0, BATCH_BLOCKS * (MAX_MESSAGES + 5) + 1)
            assert len(writer.messages) <= MAX_MESSAGES + 2

    run(main())


def test_what_waits_for_a_writer_that_is_silent_is_lost_with_what_it_did_not_answer() -> None:
    """Else one that hangs would hold all the memory there is for minutes, and the others get nothing."""

    async def main() -> None:
        async with stage() as system:
            system.writers[0].is_silent = True
            for number in range(40):
                system.put(f"r{number}", number * 20, 20)
            await asyncio.sleep(STORE_S + 0.1)
            assert system.store.num_bytes == 0 and system.counts == (0, 800)

    run(main())


def test_a_late_loss_after_the_request_has_ended_is_counted_and_forgotten() -> None:
    async def main() -> None:
        async with stage() as system:
            system.writers[0].is_silent = True
            system.put("r1", 0, 1)
            system.store.forget("r1")
            await system.quiet()
            assert system.counts == (0, 1) and not system.store.is_failed("r1") and not system.store._requests

    run(main())


def test_a_bulk_without_room_loses_them() -> None:
    async def main() -> None:
        async with stage(max_bytes=1 << 20) as system:
            system.bulk._shelf.max_bytes = INLINE_BYTES
            assert system.put("r1", 0, 4, size=INLINE_BYTES // 2)
            await system.quiet()
            assert system.counts == (0, 4)

    run(main())


@pytest.mark.parametrize("how", ["exit", "cancel"])
@pytest.mark.parametrize("num_turns", range(12))
def test_ended_at_any_await_nothing_is_left_behind(num_turns: int, how: str) -> None:
    async def main() -> None:
        async with stage() as system:
            system.put("r1", 0, 3, size=INLINE_BYTES)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if how == "exit":
                system.exit("w0")
            else:
                for task in list(system.here.tasks):
                    task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert system.bulk.num_offers == 0
            if how == "exit" or num_turns:  # one that was cancelled before its start took nothing
                assert system.store.num_bytes == 0 and sum(system.counts) == 3
            system.store.on_load(load(Role.WRITER, "w0", "b"))
            assert system.put("r2", 0, 2)
            await system.quiet()
            assert not system.store.is_failed("r2")

    run(main())
