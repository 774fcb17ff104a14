"""Ranks of an expert-parallel group among the other actors: they step and sleep together, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from actors.balancers.actor import Balancer
from actors.decode.actor import PAUSE_S, Decode
from actors.prefill.actor import Prefill
from bus.ranks import GroupLost, GroupOf
from kernels.engine import Chunk, GroupError
from kernels.timed import StepCost, TimedEngine
from run.virtual import run_virtual
from schemas.message import Role
from schemas.request import Finished, FinishReason
from tests.actors.builders import submit
from tests.actors.core import VOCABULARY, Core, core, info, quiet

STEP_S = 0.01
COST = StepCost(step_ns=int(STEP_S * 1e9))
TIMEOUT_S = 15.0
LENGTH = Finished(reason=FinishReason.LENGTH)


class Crew:
    """What the ranks of a group have in common: a step is done when all have come to it."""

    def __init__(self, size: int, life: int = 1) -> None:
        self.lives = tuple(range(life, life + size))
        self.is_gone = False
        self._said: dict[int, bool] = {}
        self._met: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def agree(self, rank: int, is_busy: bool) -> bool:
        """Whether some rank is busy. Raises GroupError when one is gone, or does not come in time."""
        if self.is_gone:
            raise GroupError(f"rank {rank}: connection closed")
        self._said[rank] = is_busy
        met = self._met
        if len(self._said) == len(self.lives):
            met.set_result(any(self._said.values()))
            self._said, self._met = {}, asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                is_awake = await asyncio.shield(met)
        except TimeoutError:
            self.is_gone = True
            raise GroupError(f"rank {rank}: timed out") from None
        if self.is_gone:
            raise GroupError(f"rank {rank}: connection closed")
        return is_awake

    def lose(self) -> None:
        """A rank is gone: who waits for it hears at once."""
        self.is_gone = True
        if not self._met.done():
            self._met.set_result(False)


class Part:
    """A rank's part in it."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self.crew, self.rank, self.size, self.lives = crew, rank, len(crew.lives), crew.lives
        self.num_steps = self.version = self.num_busy = 0
        self.is_awake = self.is_broken = False
        self.places: list[npt.NDArray[np.int64]] = []

    @property
    def generation(self) -> int:
        return self.lives[0]

    def take_used(self) -> list[npt.NDArray[np.int64]]:
        return []

    async def rearrange(self, version: int, places: Sequence[npt.NDArray[np.int64]]) -> None:
        """Nobody asks for it."""

    async def begin(self, is_busy: bool) -> None:
        try:
            self.is_awake = await self.crew.agree(self.rank, is_busy)
        except GroupError:
            self.is_broken = True
            raise
        self.num_steps += 1
        self.num_busy += is_busy


class Grouped(TimedEngine):
    """Steps with the others. `is_stuck`: it does not, as a stopped process."""

    def __init__(self, crew: Crew, rank: int, **fields: Any) -> None:
        super().__init__(info(**fields), VOCABULARY, COST, most_accepted=3)
        self.part = Part(crew, rank)
        self.is_stuck = False
        self.began_s: list[float] = []

    @property
    def group(self) -> Part:
        return self.part

    async def start(self) -> None:
        await asyncio.sleep(1)  # to load its weights

    async def _begin(self, num: int) -> None:
        while self.is_stuck:
            await asyncio.sleep(1)
        await self.part.begin(num > 0)
        self.began_s.append(asyncio.get_running_loop().time())

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        await self._begin(len(chunks))
        return await super().prefill(chunks)

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        await self._begin(len(keys))
        return await super().decode(keys)


async def add_group(system: Core, role: Role, crew: Crew, **fields: Any) -> list[Grouped]:
    """Two replicas that are its ranks."""
    engines = [Grouped(crew, rank, **fields) for rank in range(2)]
    ids = (f"{role[0]}g-0", f"{role[0]}g-1")

    async def add(id: str, engine: Grouped) -> None:
        name, group = f"{role}/{id}", GroupOf(ids, crew.lives[engine.part.rank])
        bus, bulk = await system.bus(name), await system.bulk(name)
        if role is Role.PREFILL:
            await system.add(Prefill(id, bus, bulk, engine, system.open_files(name), group=group))
        else:
            await system.add(Decode(id, bus, bulk, engine, group=group))

    await asyncio.gather(*(add(id, engine) for id, engine in zip(ids, engines, strict=True)))
    return engines


async def alone(*names: str, max_tokens: int, num_tokens: int = 5) -> list[list[int]]:
    """What each is answered by replicas that are in no group."""
    async with core() as system:
        return [(await system.finish(submit(name, num_tokens, max_tokens)))[0] for name in names]


async def count_calls(system: Core) -> list[str]:
    """Of all ranks, from now on."""
    calls: list[str] = []
    listener = await system.bus("listener")
    await listener.wire.subscribe("shoal.*.*.step", lambda delivery: calls.append(delivery.subject))
    return calls


async def waited_s(system: Core, engine: Grouped, name: str, expected: list[int]) -> float:
    """For the first step behind the arrival of a request for 20 tokens, which is answered as expected."""
    arrived_s: list[float] = []
    restore = engine.restore

    async def restored(key: str, state: bytes) -> None:
        arrived_s.append(asyncio.get_running_loop().time())
        await restore(key, state)

    engine.restore = restored  # type: ignore[method-assign]
    assert await system.finish(submit(name, max_tokens=20)) == (expected, LENGTH)
    return next(began_s for began_s in engine.began_s if began_s >= arrived_s[0]) - arrived_s[0]


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_one_request_has_both_ranks_step_and_then_both_sleep(role: Role) -> None:
    async def main() -> None:
        (expected,) = await alone("a", max_tokens=20)
        async with core(int(role is Role.DECODE), int(role is Role.PREFILL), COST) as system:
            engines = await add_group(system, role, Crew(2))
            calls = await count_calls(system)
            await asyncio.sleep(1)
            parts = [engine.part for engine in engines]
            slept_at, busy = parts[0].num_steps, [part.num_busy for part in parts]
            assert slept_at == parts[1].num_steps and not any(part.is_awake for part in parts)
            assert await system.finish(submit("a", max_tokens=20)) == (expected, LENGTH)
            await asyncio.sleep(1)
            num_steps = parts[0].num_steps
            assert num_steps == parts[1].num_steps > slept_at and not any(part.is_awake for part in parts)
            assert sorted(part.num_busy - before for part, before in zip(parts, busy, strict=True))[0] == 0
            assert await quiet(system) == {} and len(calls) == 1
            await asyncio.sleep(60)
            assert [part.num_steps for part in parts] == [num_steps] * 2 and len(calls) == 1

    run_virtual(main())


def test_a_request_on_an_idle_rank_of_a_busy_group_waits_for_one_step_at_most() -> None:
    """A rank with a full batch and one with none step together, however uneven their work is (spec serving §7, 27)."""

    async def main() -> None:
        (expected,) = await alone("late", max_tokens=20)
        async with core(1, 0, COST) as system:
            engines = await add_group(system, Role.DECODE, Crew(2))
            full, idle = engines
            running = [f"r{number}" for number in range(4)]
            idle_actor = system.actors["decode/dg-1"]
            assert isinstance(idle_actor, Decode)
            await idle_actor.drain()  # so that all go to the other one
            await asyncio.gather(*(system.send(submit(name, max_tokens=300)) for name in running))
            await asyncio.sleep(0.5)
            assert len(system.actors["decode/dg-0"].slots) == 4 and full.part.is_awake  # type: ignore[attr-defined]
            assert full.part.num_steps == idle.part.num_steps and idle.part.num_busy == 0
            idle_actor.is_draining = False
            await idle_actor.report_load()
            assert await waited_s(system, idle, "late", expected) <= 2 * STEP_S  # in one it claims its request
            assert idle.part.num_busy > 0 and full.part.num_steps == idle.part.num_steps
            await asyncio.gather(*(system.listener.over(name).wait() for name in running))

    run_virtual(main())


def test_a_rank_that_waits_for_who_reads_its_tokens_is_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a request and does not go on with it: its group is asleep, but must not be so for others."""

    async def main() -> None:
        (expected,) = await alone("late", max_tokens=20)
        async with core(1, 0, COST) as system:
            _, other = await add_group(system, Role.DECODE, Crew(2))
            waiting, other_actor = (system.actors[f"decode/dg-{rank}"] for rank in range(2))
            assert isinstance(waiting, Decode)
            await other_actor.drain()
            await system.send(submit("r", max_tokens=300))
            await asyncio.sleep(0.5)
            with monkeypatch.context() as behind:
                behind.setattr(waiting._telling, "is_backlogged", lambda destination: True)
                await asyncio.sleep(PAUSE_S)
                assert not other.part.is_awake
                await waiting.drain()
                other_actor.is_draining = False
                await other_actor.report_load()
                assert await waited_s(system, other, "late", expected) <= 2 * STEP_S
            await system.listener.over("r").wait()

    run_virtual(main())


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
@pytest.mark.parametrize("is_killed", [True, False])
def test_requests_of_a_lost_group_go_on_when_it_comes_back(role: Role, is_killed: bool) -> None:
    """Killed, or only standing still: what its other ranks held is lost as well, and is computed anew."""

    async def main() -> None:
        num_tokens = 900 if role is Role.PREFILL else 5
        (expected,) = await alone("r", max_tokens=90, num_tokens=num_tokens)
        async with core(int(role is Role.DECODE), int(role is Role.PREFILL), COST) as system:
            crew = Crew(2)
            engines = await add_group(system, role, crew, num_slots=8)
            names = [f"r{number}" for number in range(6)]
            await asyncio.gather(*(system.send(submit(name, num_tokens, 90)) for name in names))
            await asyncio.sleep(0.05)
            ids = [f"{role}/{role[0]}g-{rank}" for rank in range(2)]
            assert all(engine.part.num_busy for engine in engines)
            if is_killed:
                system.kill(ids[1])
                crew.lose()
            else:
                engines[1].is_stuck = True
            with pytest.raises(GroupError, match="connection closed" if is_killed else "timed out"):
                async with asyncio.timeout(60):
                    await system.tasks[ids[0]]
            await asyncio.sleep(0.1)
            owners = [one.owner for one in system.entrypoint.shard.live()]
            assert all(one is None or one.role is not role for one in owners)  # also of one that stands still
            balancer = system.actors[f"{role}-balancer/{role[0]}b0"]
            assert isinstance(balancer, Balancer) and balancer.ledger.num_replicas == 0
            if not is_killed:
                system.kill(ids[1])
            await system.send(submit("new", 5, 20))
            await asyncio.sleep(1)
            await add_group(system, role, Crew(2, life=9))
            async with asyncio.timeout(60):
                await asyncio.gather(*(system.listener.over(name).wait() for name in [*names, "new"]))
            assert set(system.listener.ends.values()) == {LENGTH}
            assert [system.listener.tokens[name] for name in names] == [expected] * 6
            assert system.entrypoint.shard.detail()["lost"] > 0
            for name in ids:
                system.bulks.pop(name)  # those of before are gone with what they held
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_group_asleep_ends_when_one_of_its_ranks_starts_anew() -> None:
    async def main() -> None:
        async with core(1, 0, COST) as system:
            crew = Crew(2)
            await add_group(system, Role.DECODE, crew)
            system.kill("decode/dg-1")
            await asyncio.sleep(1)
            assert not system.tasks["decode/dg-0"].done()  # it cannot know
            anew = Grouped(Crew(2, life=9), 1)
            name = "decode/dg-1"
            group = GroupOf(("dg-0", "dg-1"), anew.part.lives[1])
            await system.add(Decode("dg-1", await system.bus(name), await system.bulk(name), anew, group=group))
            with pytest.raises(GroupLost, match="dg-1 has ended, and starts anew"):
                async with asyncio.timeout(60):
                    await system.tasks["decode/dg-0"]

    run_virtual(main())
