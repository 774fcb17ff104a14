"""Window snapshots: what is pulled is what was kept under that key, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from actors.rules.owner import EXPIRY_S
from actors.rules.ring import Ring
from bus.bulk import MemoryBulk
from bus.snapshots import PULL_S, SNAPSHOT_S, TOLD_AT_ONCE, Snapshots
from run.virtual import VirtualLoop, run_virtual
from schemas.bulk import Handle
from schemas.cache import Snapshot
from schemas.liveness import ProcessExited
from tests.bus.members import FakeShard, Place, place

HEAD = 17  # what is offered begins with key and flag


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


class Stage:
    """One who keeps snapshots, one who pulls them, and the shards that know of them."""

    def __init__(self, here: Place, holder: Snapshots, bulk: MemoryBulk, reader: Snapshots) -> None:
        self.here = here
        self.holder = holder
        self.bulk = bulk
        self.reader = reader
        self.shards: list[FakeShard] = []

    async def join(self, *ids: str) -> None:
        for id in ids:
            self.shards.append(FakeShard(self.here, id))
            await self.shards[-1].start()
        await self.beat()

    async def beat(self) -> None:
        """A load report of each shard arrives; what follows from it, too."""
        for shard in self.shards:
            await self.holder.on_load(shard.report())
        await asyncio.sleep(0)

    async def keep(self, number: int, data: bytes, *, approximate: bool = False) -> Snapshot:
        await self.holder.keep(key(number), data, approximate=approximate)
        await self.beat()
        return self.holder._pool[key(number)].snapshot

    @property
    def known(self) -> dict[bytes, Snapshot]:
        return {key: snapshot for shard in self.shards for key, snapshot in shard.known.items()}

    @property
    def held(self) -> tuple[int, int, int]:
        return self.bulk.num_offers, len(self.holder), self.holder.num_bytes


@asynccontextmanager
async def stage(max_bytes: int = 1000, num_shards: int = 1, **bulk: int) -> AsyncIterator[Stage]:
    async with place() as here:
        ours, theirs = await here.bulk(**bulk), await here.bulk()
        holder = Snapshots(await here.bus(), ours, "decode/d0", Ring(), max_bytes)
        system = Stage(here, holder, ours, Snapshots(await here.bus(), theirs, "prefill/p0", Ring()))
        await system.join(*(f"m{number}" for number in range(num_shards)))
        yield system
        await asyncio.sleep(SNAPSHOT_S)
        assert system.held == (0, 0, 0)


def test_what_is_kept_is_made_known_and_can_be_pulled_again_and_again() -> None:
    async def main() -> None:
        async with stage() as system:
            snapshot = await system.keep(1, b"windows", approximate=True)
            assert system.known == {key(1): snapshot}
            assert (snapshot.key, snapshot.holder, snapshot.approximate) == (key(1), "decode/d0", True)
            assert snapshot.expires_ns == int((asyncio.get_running_loop().time() + SNAPSHOT_S) * 1e9)
            for _ in range(3):
                assert await system.reader.pull(snapshot) == b"windows"
            assert system.reader.pulled_bytes == 3 * (HEAD + 7) and system.held == (1, 1, HEAD + 7)

    run_virtual(main())


def test_the_oldest_go_when_there_is_no_room() -> None:
    async def main() -> None:
        async with stage(max_bytes=3 * (HEAD + 100)) as system:
            kept = [await system.keep(number, bytes([number]) * 100) for number in range(5)]
            assert [await system.reader.pull(one) for one in kept] == [
                None,
                None,
                *(bytes([n]) * 100 for n in (2, 3, 4)),
            ]
            assert system.held == (3, 3, 3 * (HEAD + 100))
            large = await system.keep(9, bytes(300))
            assert system.held == (1, 1, HEAD + 300) and await system.reader.pull(large) == bytes(300)
            await system.holder.keep(key(10), bytes(400), approximate=False)
            assert system.held == (1, 1, HEAD + 300)  # nothing goes for what does not fit anyway

    run_virtual(main())


def test_an_approximate_one_never_takes_the_place_of_an_exact_one() -> None:
    async def main() -> None:
        async with stage() as system:
            rough = await system.keep(1, b"rough", approximate=True)
            exact = await system.keep(1, b"exact")
            assert await system.reader.pull(rough) is None and await system.reader.pull(exact) == b"exact"
            await asyncio.sleep(SNAPSHOT_S - 1)  # not even when it is about to end
            assert await system.keep(1, b"rough", approximate=True) == exact
            await asyncio.sleep(1)
            assert (await system.keep(1, b"rough", approximate=True)).approximate

    run_virtual(main())


def test_one_that_is_held_already_is_kept_anew_in_its_second_half() -> None:
    async def main() -> None:
        async with stage() as system:
            first = await system.keep(1, b"windows")
            await asyncio.sleep(SNAPSHOT_S / 2 - 1)
            assert await system.keep(1, b"windows") == first and len(system.shards[0].heard) == 1
            await asyncio.sleep(2)
            second = await system.keep(1, b"windows")
            assert second != first and system.known == {key(1): second} and system.held[:2] == (1, 1)
            await asyncio.sleep(SNAPSHOT_S / 2)
            assert await system.reader.pull(second) == b"windows"
            assert await system.reader.pull(first) == b"windows"  # who heard of it before finds it, too

    run_virtual(main())


def test_what_is_used_lives_on_with_whoever_uses_it() -> None:
    async def main() -> None:
        async with stage() as system:

            async def use(snapshot: Snapshot) -> None:
                await system.reader.on_load(system.shards[0].report())
                await system.reader.used(snapshot, b"windows")
                await asyncio.sleep(0)

            first = await system.keep(1, b"windows")
            await use(first)
            assert len(system.reader) == 0  # not as long as the other has it for a while
            await asyncio.sleep(SNAPSHOT_S / 2 + 1)
            await use(first)
            await asyncio.sleep(SNAPSHOT_S / 2)
            assert system.held == (0, 0, 0)
            second = system.known[key(1)]
            assert second.holder == "prefill/p0" and await system.holder.pull(second) == b"windows"
            for _ in range(6):
                await use(system.known[key(1)])
                await asyncio.sleep(SNAPSHOT_S * 0.49)
            assert await system.holder.pull(second) == b"windows" and len(system.reader) == 1

    run_virtual(main())


def test_what_is_used_goes_last() -> None:
    async def main() -> None:
        async with stage(max_bytes=3 * (HEAD + 100)) as system:
            kept = [await system.keep(number, bytes([number]) * 100) for number in range(3)]
            await system.holder.used(kept[0], bytes(100))
            await system.keep(4, bytes(100))
            assert [await system.reader.pull(one) is not None for one in kept] == [True, False, True]

    run_virtual(main())


def test_after_its_time_nothing_is_left() -> None:
    async def main() -> None:
        async with stage() as system:
            snapshot = await system.keep(1, b"windows")
            await asyncio.sleep(SNAPSHOT_S - 0.001)
            assert await system.reader.pull(snapshot) == b"windows"
            await asyncio.sleep(0.002)
            assert system.held == (0, 0, 0)  # between look-up and pull
            assert await system.reader.pull(snapshot) is None

    run_virtual(main())


def test_a_bulk_without_room_keeps_nothing() -> None:
    async def main() -> None:
        async with stage(max_bytes=1000, num_shards=1) as system:
            system.bulk._shelf.max_bytes = 100
            await system.holder.keep(key(1), bytes(200), approximate=False)
            assert system.held == (0, 0, 0) and system.known == {}

    run_virtual(main())


def test_a_reader_who_comes_late_to_a_place_used_again_gets_nothing() -> None:
    async def main() -> None:
        async with stage() as system:
            system.bulk._shelf._new_key = lambda: "slot"
            first = await system.keep(1, b"windows A", approximate=True)
            # The same key, flag, size and checksum: what is left to tell the two apart is the generation.
            system.holder.clear()
            second = await system.keep(1, b"windows B", approximate=True)
            stale = structs.replace(first, handle=structs.replace(first.handle, checksum=second.handle.checksum))
            assert (stale.handle.key, stale.handle.size_bytes) == (second.handle.key, second.handle.size_bytes)
            assert await system.reader.pull(stale) is None
            assert await system.reader.pull(second) == b"windows B"

    run_virtual(main())


@pytest.mark.parametrize(
    ("change", "of_handle"),
    [
        ({"key": key(2)}, {}),  # the hint was mixed up
        ({"approximate": True}, {}),
        ({}, {"checksum": 1}),
        ({}, {"size_bytes": HEAD + 8}),
        ({}, {"size_bytes": 1 << 50}),
        ({}, {"key": "0" * 32}),
        ({}, {"address": "mem://nobody"}),
    ],
)
def test_a_hint_that_does_not_fit_gives_nothing(change: dict[str, Any], of_handle: dict[str, Any]) -> None:
    async def main() -> None:
        async with stage() as system:
            snapshot = await system.keep(1, b"windows")
            wrong = structs.replace(snapshot, **change, handle=structs.replace(snapshot.handle, **of_handle))
            assert await system.reader.pull(wrong) is None
            assert await system.reader.pull(snapshot) == b"windows"

    run_virtual(main())


def test_a_byte_that_was_damaged_on_its_way_is_found() -> None:
    async def main() -> None:
        async with stage() as system:
            snapshot = await system.keep(1, b"windows")
            offer = system.bulk._shelf._offers[snapshot.handle.key]
            offer.data, offer.checksum = offer.data[:-1] + b"S", offer.checksum ^ 1
            assert await system.reader.pull(snapshot) is None

    run_virtual(main())


def test_a_holder_that_died_costs_nothing_but_the_windows() -> None:
    async def main() -> None:
        async with stage() as system:
            snapshot = await system.keep(1, b"windows")
            system.bulk.cut()
            assert await system.reader.pull(snapshot) is None

    run_virtual(main())


def test_a_holder_that_does_not_answer_is_waited_for_only_so_long() -> None:
    class Hanging(MemoryBulk):
        async def pull(self, handle: Handle, *, timeout_s: float) -> bytes:
            await asyncio.sleep(timeout_s)
            return await super().pull(structs.replace(handle, address="mem://nobody"), timeout_s=timeout_s)

    async def main() -> None:
        async with place() as here:
            reader = Snapshots(await here.bus(), Hanging(here.hub), "prefill/p0", Ring())
            handle = Handle(address="mem://1", key="k", generation=1, size_bytes=1, checksum=0)
            assert await reader.pull(Snapshot(key=key(1), holder="d", handle=handle, expires_ns=0)) is None
            assert asyncio.get_running_loop().time() == pytest.approx(PULL_S)

    run_virtual(main())


class TestMakingKnown:
    """Whoever owns a key now is told, once."""

    def test_each_key_goes_to_its_owner_and_once_only(self) -> None:
        async def main() -> None:
            async with stage(num_shards=3, max_bytes=1 << 20) as system:
                for number in range(60):
                    await system.keep(number, b"x")
                for _ in range(3):
                    await system.beat()
                assert all(len(shard.heard) > 5 for shard in system.shards)
                assert sum(len(shard.heard) for shard in system.shards) == 60 == len(system.known)

        run_virtual(main())

    def test_one_that_joins_is_told_what_is_its_own_now_and_the_others_nothing(self) -> None:
        async def main() -> None:
            async with stage(num_shards=2, max_bytes=1 << 20) as system:
                for number in range(60):
                    await system.keep(number, b"x")
                await system.join("m2")
                await system.beat()
                owners = Ring.of(system.holder._owners, [key(n) for n in range(60)], 0)  # type: ignore[arg-type]
                theirs = {key(n) for n in range(60) if owners[n] == "m2"}
                assert set(system.shards[2].known) == theirs and 5 < len(theirs) < 40
                assert sum(len(shard.heard) for shard in system.shards) == 60 + len(theirs)

        run_virtual(main())

    @pytest.mark.parametrize("how", ["exit", "silence"])
    def test_what_one_that_left_knew_the_others_are_told(self, how: str) -> None:
        async def main() -> None:
            async with stage(num_shards=2, max_bytes=1 << 20) as system:
                for number in range(60):
                    await system.keep(number, b"x")
                gone = system.shards.pop()
                if how == "exit":
                    system.holder.on_exited(ProcessExited(name="n", pid=1, members=[f"metadata/{gone.id}"]))
                else:
                    await system.beat()
                    await asyncio.sleep(EXPIRY_S)
                assert 0 < len(system.known) < 60
                await system.beat()
                assert len(system.known) == 60

        run_virtual(main())

    def test_one_that_was_restarted_is_told_all_of_its_own(self) -> None:
        async def main() -> None:
            async with stage(max_bytes=1 << 20) as system:
                num = TOLD_AT_ONCE + 10
                for number in range(num):
                    await system.keep(number, b"x")
                system.shards[0].restart()
                assert system.known == {}
                await system.beat()
                assert len(system.known) == num

        run_virtual(main())

    def test_what_was_kept_while_nobody_was_there_is_told_later(self) -> None:
        async def main() -> None:
            async with stage(num_shards=0) as system:
                await system.keep(1, b"x")
                await system.join("m0")
                assert set(system.known) == {key(1)}

        run_virtual(main())


class Slow(MemoryBulk):
    """Sums up large ones beside the loop, as sockets do."""

    async def checksum(self, data: bytes) -> int:
        for _ in range(len(data) // 100 + 1):
            await asyncio.sleep(0)
        return await super().checksum(data)


def test_of_two_that_are_kept_at_once_the_exact_one_stays() -> None:
    async def main() -> None:
        async with place() as here:
            bulk = Slow(here.hub)
            await bulk.start()
            holder = Snapshots(await here.bus(), bulk, "decode/d0", Ring(), 1000)
            rough = holder.keep(key(0), bytes(300), approximate=True)
            await asyncio.gather(rough, holder.keep(key(0), b"exact", approximate=False))
            assert await holder.pull(holder._pool[key(0)].snapshot) == b"exact" and bulk.num_offers == 1
            holder.clear()

    run_virtual(main())


@pytest.mark.parametrize("num_turns", range(8))
def test_keeping_may_be_cancelled_at_any_await(num_turns: int) -> None:
    async def main() -> None:
        async with place() as here:
            bulk = Slow(here.hub)
            await bulk.start()
            holder = Snapshots(await here.bus(), bulk, "decode/d0", Ring(), 1000)
            shard = FakeShard(here, "m0")
            await shard.start()
            await holder.on_load(shard.report())
            await holder.keep(key(0), b"before", approximate=True)
            keeping = asyncio.create_task(holder.keep(key(0), b"after!", approximate=False))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            keeping.cancel()
            await asyncio.wait([keeping])
            assert (bulk.num_offers, len(holder), holder.num_bytes) == (1, 1, HEAD + 6)
            data = await holder.pull(holder._pool[key(0)].snapshot)
            assert data == (b"before" if keeping.cancelled() and num_turns < 2 else b"after!")
            await asyncio.sleep(SNAPSHOT_S)
            assert (bulk.num_offers, len(holder), holder.num_bytes) == (0, 0, 0)

    run_virtual(main())


@pytest.mark.parametrize("num_turns", range(4))
def test_pulling_may_be_cancelled_at_any_await(num_turns: int) -> None:
    async def main() -> None:
        async with stage() as system:
            snapshot = await system.keep(1, b"windows")
            pulling = asyncio.create_task(system.reader.pull(snapshot))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            pulling.cancel()
            await asyncio.wait([pulling])
            assert system.held == (1, 1, HEAD + 7) and await system.reader.pull(snapshot) == b"windows"

    run_virtual(main())


NUMBERS, SIZES = st.integers(0, 5), st.sampled_from([0, 40, 40, 90, 150])
MAX_BYTES = 200


class Model(RuleBasedStateMachine):
    """A dict of what should be held, in the order in which it goes; every snapshot that ever was is asked for again."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.model: dict[int, tuple[bytes, bool, float]] = {}
        self.ever: list[tuple[int, bytes, Snapshot]] = []
        self.num_kept = 0
        self.runner.run(self.start())

    async def start(self) -> None:
        here = Place()
        self.bulk = await here.bulk()
        holder = Snapshots(await here.bus(), self.bulk, "decode/d0", Ring(), MAX_BYTES)
        reader = Snapshots(await here.bus(), await here.bulk(), "prefill/p0", Ring())
        self.system = Stage(here, holder, self.bulk, reader)
        await self.system.join("m0", "m1")

    def now_s(self) -> float:
        return self.runner.get_loop().time()

    def expire(self) -> None:
        self.model = {number: kept for number, kept in self.model.items() if kept[2] > self.now_s()}

    @rule(number=NUMBERS, size=SIZES, approximate=st.booleans())
    def keep(self, number: int, size: int, approximate: bool) -> None:
        self.num_kept += 1
        data = self.num_kept.to_bytes(4, "little") + bytes(size)
        self.runner.run(self.system.holder.keep(key(number), data, approximate=approximate))
        held = self.model.get(number)
        if held is not None and held[1] < approximate:
            return
        if held is not None and held[1] == approximate:
            self.keep_on(number)
            return
        self.model.pop(number, None)
        while sum(HEAD + len(data) for data, _, _ in self.model.values()) + HEAD + len(data) > MAX_BYTES:
            del self.model[next(iter(self.model))]
        self.model[number] = data, approximate, self.now_s() + SNAPSHOT_S
        self.ever.append((number, data, self.system.holder._pool[key(number)].snapshot))

    def keep_on(self, number: int) -> None:
        data, approximate, until_s = self.model[number]
        if until_s - self.now_s() < SNAPSHOT_S / 2:
            del self.model[number]
            self.model[number] = data, approximate, self.now_s() + SNAPSHOT_S

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, 5))
    def use(self, choice: int) -> None:
        number = list(self.model)[choice % len(self.model)]
        data, approximate, until_s = self.model.pop(number)
        self.model[number] = data, approximate, until_s
        holder = self.system.holder
        snapshot = holder._pool[key(number)].snapshot
        self.runner.run(holder.used(snapshot, data))
        self.keep_on(number)

    @rule(share=st.sampled_from([0.1, 0.3, 0.55, 1.1]))
    def pass_time(self, share: float) -> None:
        async def sleep() -> None:
            end_s = self.now_s() + share * SNAPSHOT_S
            while self.now_s() < end_s:
                await asyncio.sleep(2.0)
                await self.system.beat()

        self.runner.run(sleep())
        self.expire()

    @precondition(lambda self: len(self.system.shards) < 4)
    @rule(number=st.integers(2, 9))
    def join(self, number: int) -> None:
        if f"m{number}" not in {shard.id for shard in self.system.shards}:
            self.runner.run(self.system.join(f"m{number}"))

    @precondition(lambda self: len(self.system.shards) > 1)
    @rule()
    def leave(self) -> None:
        gone = self.system.shards.pop(0)
        gone._bus.wire.cut()  # type: ignore[attr-defined]
        self.system.holder.on_exited(ProcessExited(name="n", pid=1, members=[f"metadata/{gone.id}"]))
        self.runner.run(self.system.beat())

    @rule()
    def restart(self) -> None:
        self.system.shards[0].restart()
        self.runner.run(self.system.beat())

    @rule()
    def clear(self) -> None:
        self.system.holder.clear()
        self.model.clear()

    @invariant()
    def what_is_held_is_the_model(self) -> None:
        sizes = [HEAD + len(data) for data, _, _ in self.model.values()]
        assert self.system.held == (len(sizes), len(sizes), sum(sizes)) and sum(sizes) <= MAX_BYTES

    @invariant()
    def a_pull_gives_what_is_held_or_nothing(self) -> None:
        for number, data, snapshot in self.ever[-8:]:
            is_held = number in self.model and self.model[number][0] == data
            assert self.runner.run(self.system.reader.pull(snapshot)) == (data if is_held else None)

    @invariant()
    def whoever_owns_a_key_knows_its_snapshot(self) -> None:
        self.runner.run(asyncio.sleep(0))
        for number in self.model:
            (owner,) = self.system.holder._owners.of([key(number)], self.now_s())
            (shard,) = (shard for shard in self.system.shards if shard.id == owner)
            assert shard.known[key(number)] == self.system.holder._pool[key(number)].snapshot

    def teardown(self) -> None:
        self.runner.close()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_what_is_held_has_a_lease_that_each_use_begins_anew() -> None:
    """Also when nobody is left to let go of it: memory is never held on hope."""

    async def main() -> None:
        async with stage() as system:
            snapshot = await system.keep(1, b"windows")
            await asyncio.sleep(SNAPSHOT_S * 0.8)
            await system.holder.used(snapshot, b"windows")
            await asyncio.sleep(SNAPSHOT_S * 0.8)
            assert await system.reader.pull(snapshot) == b"windows"
            for kept in system.holder._pool.values():  # as if its owner were gone without a word
                kept.timer.cancel()
            await asyncio.sleep(SNAPSHOT_S * 0.3)
            assert system.bulk.num_offers == 0
            system.holder.clear()

    run_virtual(main())
