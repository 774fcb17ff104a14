"""Ranks of an expert-parallel group among the other actors: they step and sleep together, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from actors.decode.actor import PAUSE_S, Decode
from actors.entrypoint.owner import Owner
from actors.prefill.actor import Prefill
from bus.meeting import GroupOf
from bus.pulse import MAX_FAILED, Sick
from bus.subjects import EXITED
from kernels.engine import Chunk
from kernels.timed import StepCost
from run.simulate.ranks import Crew, Grouped
from run.virtual import run_virtual
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Finished, FinishReason
from tests.actors.builders import submit
from tests.actors.core import VOCABULARY, Core, core, info, quiet

STEP_S = 0.01
COST = StepCost(step_ns=int(STEP_S * 1e9))
LENGTH = Finished(reason=FinishReason.LENGTH)


class Rank(Grouped):
    """`is_stuck`: it does not step, as a stopped process. `is_numb`: what it computes are no numbers."""

    def __init__(self, crew: Crew, rank: int, **fields: Any) -> None:
        super().__init__(crew, rank, info(**fields), VOCABULARY, COST, most_accepted=3)
        self.is_stuck = self.is_numb = False
        self.began_s: list[float] = []

    async def start(self) -> None:
        await asyncio.sleep(1)  # to load its weights

    async def _begin(self) -> None:
        while self.is_stuck:
            await asyncio.sleep(1)
        self.began_s.append(asyncio.get_running_loop().time())

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        await self._begin()
        return await super().prefill(chunks)

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        await self._begin()
        new = await super().decode(keys)
        return [[] for _ in new] if self.is_numb else new


IDS = ("g-0", "g-1")


async def add_rank(system: Core, role: Role, crew: Crew, rank: int, life: int = 1, **fields: Any) -> Rank:
    """A replica that is one of its ranks."""
    engine, id = Rank(crew, rank, **fields), IDS[rank]
    name, group = f"{role}/{id}", GroupOf(IDS, life, crew.timeout_s)
    bus, bulk = await system.bus(name), await system.bulk(name)
    if role is Role.PREFILL:
        await system.add(Prefill(id, bus, bulk, engine, system.open_files(name), group=group))
    else:
        await system.add(Decode(id, bus, bulk, engine, group=group))
    return engine


async def add_group(system: Core, role: Role, crew: Crew, **fields: Any) -> list[Rank]:
    return list(await asyncio.gather(*(add_rank(system, role, crew, rank, **fields) for rank in range(2))))


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


async def waited_s(system: Core, engine: Rank, name: str, expected: list[int]) -> float:
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
            idle_actor = system.actors["decode/g-1"]
            assert isinstance(idle_actor, Decode)
            await idle_actor.drain()  # so that all go to the other one
            await asyncio.gather(*(system.send(submit(name, max_tokens=300)) for name in running))
            await asyncio.sleep(0.5)
            assert len(system.actors["decode/g-0"].slots) == 4 and full.part.is_awake  # type: ignore[attr-defined]
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
            waiting, other_actor = (system.actors[f"decode/g-{rank}"] for rank in range(2))
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


def test_a_rank_whose_engine_fails_at_everything_is_found_out_however_many_steps_it_serves_others() -> None:
    async def main() -> None:
        async with core(1, 0, COST) as system:
            engines = await add_group(system, Role.DECODE, Crew(2))
            other = system.actors["decode/g-1"]
            assert isinstance(other, Decode)
            await other.drain()
            engines[0].is_numb = True
            for number in range(MAX_FAILED):
                await system.send(submit(f"r{number}"))
                await asyncio.sleep(1)
            with pytest.raises(Sick):
                await system.tasks.pop("decode/g-0")

    run_virtual(main())


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
@pytest.mark.parametrize("is_killed", [True, False])
def test_ranks_that_are_left_go_on_and_take_in_who_comes_back(role: Role, is_killed: bool) -> None:
    """Killed, or only standing still: what that rank held is computed anew, what the other one holds goes on."""

    async def main() -> None:
        num_tokens = 900 if role is Role.PREFILL else 5
        (expected,) = await alone("r", max_tokens=90, num_tokens=num_tokens)
        async with core(int(role is Role.DECODE), int(role is Role.PREFILL), COST) as system:
            crew = Crew(2)
            engines = await add_group(system, role, crew, num_slots=8)
            names = [f"r{number}" for number in range(6)]
            await asyncio.gather(*(system.send(submit(name, num_tokens, 90)) for name in names))
            await asyncio.sleep(0.05)
            ids = [f"{role}/{id}" for id in IDS]
            assert all(engine.part.num_busy for engine in engines)
            kept = [one for one in system.entrypoint.shard.live() if one.owner == Owner(role, IDS[0])]
            epochs = {one.id: one.epoch for one in kept}
            if is_killed:
                system.kill(ids[1])
                engines[1].part.abandon()
            else:
                engines[1].is_stuck = True
            await asyncio.sleep(crew.timeout_s + 5)
            assert (engines[0].part.size, engines[0].part.rank) == (1, 0)
            async with asyncio.timeout(60):
                await asyncio.gather(*(system.listener.over(name).wait() for name in names))
            assert set(system.listener.ends.values()) == {LENGTH}
            assert [system.listener.tokens[name] for name in names] == [expected] * 6
            if role is Role.DECODE:
                assert epochs
                for one in kept:  # by no other replica
                    assert (one.epoch, one.num_lost) == (epochs[one.id], 0)
            assert system.entrypoint.shard.detail()["lost"] > 0
            if is_killed:
                system.bulks.pop(ids[1])  # gone with what it held
                engines[1] = await add_rank(system, role, crew, 1, life=2)
            else:
                engines[1].is_stuck = False
            await asyncio.sleep(5)
            assert {engine.part.size for engine in engines} == {2}
            assert len({engine.part.generation for engine in engines}) == 1
            await system.send(submit("new", num_tokens, 90))
            await system.listener.over("new").wait()
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_group_asleep_goes_on_without_a_rank_that_was_killed_and_with_its_successor() -> None:
    async def main() -> None:
        (expected,) = await alone("r", max_tokens=20)
        async with core(1, 0, COST) as system:
            crew = Crew(2)
            left, _ = await add_group(system, Role.DECODE, crew)
            await asyncio.sleep(1)
            system.kill("decode/g-1")
            await asyncio.sleep(60)
            assert left.part.size == 2  # it cannot know
            anew = await add_rank(system, Role.DECODE, crew, 1, life=2)
            assert (left.part.size, left.part.generation) == (2, anew.part.generation)
            for life in (3, 4):  # again, and again while it serves
                system.kill("decode/g-1")
                anew.part.abandon()
                await system.send(submit(f"r{life}", max_tokens=500))
                await asyncio.sleep(5)
                assert left.part.size == 1
                anew = await add_rank(system, Role.DECODE, crew, 1, life=life)
                assert (left.part.size, left.part.generation) == (2, anew.part.generation)
            system.kill("decode/g-1")
            await system.send(submit("r", max_tokens=20))
            await system.listener.over("r").wait()
            assert system.listener.tokens["r"] == expected and left.part.size == 1

    run_virtual(main())


def test_word_of_an_end_while_a_rank_starts_is_not_taken_for_the_end_of_the_successor() -> None:
    async def main() -> None:
        async with core(1, 0, COST) as system:
            crew, watch = Crew(2), await system.bus("watch")
            starting = asyncio.create_task(add_rank(system, Role.DECODE, crew, 0))
            await asyncio.sleep(0.5)
            await watch.tell(EXITED.all(), ProcessExited(name="n", pid=1, members=["decode/g-1"]))
            await asyncio.gather(starting, add_rank(system, Role.DECODE, crew, 1, life=2))
            await asyncio.sleep(5)
            assert [system.actors[f"decode/{id}"].load().detail["meetings"] for id in IDS] == [1, 1]

    run_virtual(main())


def test_prompts_go_on_when_a_rank_comes_back() -> None:
    """The step at which all leave to meet it has computed nothing, and one that serves others is none to learn from."""

    async def main() -> None:
        (expected,) = await alone("r", max_tokens=5, num_tokens=900)
        async with core(0, 1, COST) as system:
            crew = Crew(2)
            left, _ = await add_group(system, Role.PREFILL, crew)
            actor = system.actors["prefill/g-0"]
            assert isinstance(actor, Prefill)
            system.kill("prefill/g-1")
            await system.send(submit("first", 5, 5))
            await system.listener.over("first").wait()
            assert left.part.size == 1
            call_off, calling, kept = left.part.call_off, [], []

            async def amid_a_prompt() -> None:
                await system.send(submit("r", 900, 5))
                while not actor.batch.num_running:
                    await asyncio.sleep(0.001)
                kept.append(system.entrypoint.shard.detail()["rebuilt"])
                call_off()

            left.part.call_off = lambda: calling.append(asyncio.create_task(amid_a_prompt()))  # type: ignore[method-assign]
            await add_rank(system, Role.PREFILL, crew, 1, life=2)
            await system.listener.over("r").wait()
            assert system.listener.tokens["r"] == expected and left.part.size == 2
            assert kept == [system.entrypoint.shard.detail()["rebuilt"]]
            other = system.actors["prefill/g-1"]
            assert isinstance(other, Prefill)
            learnt = actor.batch.meter._num_steps, other.batch.meter._num_steps
            await actor.drain()
            await system.send(submit("last", 900, 5))
            await system.listener.over("last").wait()
            assert (actor.batch.meter._num_steps, other.batch.meter._num_steps > learnt[1]) == (learnt[0], True)

    run_virtual(main())
