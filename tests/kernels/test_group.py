"""Engines in an expert-parallel group: the tokens of one engine, whatever the places of experts, and ends in time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kernels import group as group_module
from kernels import local as local_engine
from kernels.engine import Admission, Chunk, Sampling
from kernels.group import Group, GroupSpec
from kernels.grouping import GroupError, Regrouping
from kernels.local import LocalEngine
from kernels.places import Places
from tests.kernels.test_local_drafts import AnySchedule
from tests.untrained import untrained

CHUNK = 64
ALL_BYTES = (8 * 8 + 3 * 4) * 3 * 64 * 128 * 4
"""Of experts of layers and stages: matrices, fp32."""


def once(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """On one loop: what is tested is the same on both, and takes its time."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def engine_of(rank: int, size: int, timeout_s: float = 30.0, redundant: int = 0) -> LocalEngine:
    spec = GroupSpec(rank, size, timeout_s, redundant) if size > 1 else None
    return LocalEngine(untrained(), num_slots=4, max_step_tokens=512, group=spec)


async def meet(engines: Sequence[LocalEngine], generation: int = 1) -> None:
    await asyncio.gather(*meetings(engines, generation))


def meetings(engines: Sequence[LocalEngine], generation: int) -> list[Coroutine[Any, Any, None]]:
    """Of each one that is in a group."""
    members = [engine.group for engine in engines if engine.group]
    address = members[0].listen() if members else ""
    return [one.meet(generation, n, len(members), address) for n, one in enumerate(members)]


async def group_of(size: int, *, timeout_s: float = 30.0, redundant: int = 0) -> list[LocalEngine]:
    engines = [engine_of(rank, size, timeout_s, redundant) for rank in range(size)]
    await asyncio.gather(*(engine.start() for engine in engines))
    await meet(engines)
    return engines


async def close(engines: Sequence[LocalEngine]) -> None:
    await asyncio.gather(*(engine.close() for engine in engines))


@dataclass
class Asked:
    """A request, and what has come of it."""

    num_prompt: int
    sampling: Sampling
    num_new: int
    new: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"r{self.num_prompt}"

    @property
    def prompt(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.random.default_rng(self.num_prompt).integers(300, 900, self.num_prompt).astype(np.uint32)


def questions() -> list[Asked]:
    greedy, seeded = Sampling(0.0, 1.0, 0), Sampling(1.0, 0.95, 7)
    return [Asked(7, greedy, 9), Asked(200, seeded, 12), Asked(70, seeded, 5), Asked(150, greedy, 14)]


async def serve(engine: LocalEngine, requests: Sequence[Asked]) -> None:
    """Compute the prompts in chunks, then decode; in a group take part until all ranks are done."""

    def is_called() -> bool:
        return engine.group is not None and engine.group.is_awake

    for one in requests:
        num_tokens = one.num_prompt + one.num_new + 8
        admission = engine.admit(one.key, num_tokens, one.sampling, bounded_prompt=one.num_prompt)
        assert admission is Admission.OK
    for start in range(0, 256, CHUNK):  # as many steps on each rank
        chunks = [one.prompt[start : start + CHUNK] for one in requests]
        await engine.prefill([Chunk(one.key, c) for one, c in zip(requests, chunks, strict=True) if len(c)])
    while True:
        left = [one for one in requests if len(one.new) < one.num_new]
        for one, new in zip(left, await engine.decode([one.key for one in left]), strict=True):
            one.new += new
        if not left and not is_called():
            break


async def answers(size: int, *, num_moves: int = 0) -> list[list[int]]:
    """Of `questions`, spread over the ranks; meanwhile all experts move so many times."""
    engines, asked = await group_of(size, redundant=1 if num_moves else 0), questions()

    async def move(engine: LocalEngine) -> None:
        assert engine.group is not None
        for version in range(1, num_moves + 1):
            await engine.group.rearrange(version, shuffled(engine.group.places, version))

    moving = [asyncio.create_task(move(engine)) for engine in engines]
    try:
        await asyncio.gather(*(serve(engine, asked[rank::size]) for rank, engine in enumerate(engines)))
        if num_moves:
            versions = [engine.group.version for engine in engines if engine.group]
            assert len(set(versions)) == 1 and versions[0] > 0
        return [one.new[: one.num_new] for one in asked]
    finally:
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)
        await close(engines)


def shuffled(places: Sequence[Places], seed: int) -> list[Places]:
    """Other experts where each expert is."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(1 + int(one.max()))[one] for one in places]


@once
async def test_a_request_gets_the_same_tokens_in_groups_of_one_two_and_four() -> None:
    """In two, each rank drafts now and then, whatever the other does."""
    alone = await answers(1)
    assert len({tuple(new) for new in alone}) == len(alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_engine, "Scheduler", lambda _, temperatures: AnySchedule("fixed", temperatures))
        assert await answers(2, num_moves=9) == alone
    assert await answers(4) == alone


@once
async def test_ranks_go_and_come_amid_requests_and_no_token_is_another_one() -> None:
    """At whatever exchange of a step a rank ends, the others undo the step, meet, and go on; then it comes back."""
    alone = await answers(1)
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_engine, "Scheduler", lambda _, temperatures: AnySchedule("fixed", temperatures))
        engines, asked = await group_of(3, redundant=2), questions()
        try:
            kept = asked[0::3] + asked[1::3]
            for one, rank in zip(kept, (0, 0, 1), strict=True):
                await prefilled(engines, rank, one)
            generation, size = 1, 3
            while any(len(one.new) < one.num_new for one in kept):
                members = [engine.group for engine in engines[:size] if engine.group]
                if size == 3 and rng.random() < 0.5:
                    dying = members[2]._group
                    countdown(patch, dying, int(rng.integers(1, 12)))
                elif size == 2 and rng.random() < 0.4:
                    members[int(rng.integers(2))].call_off()
                wanted = [[one for one in kept[a:b] if len(one.new) < one.num_new] for a, b in ((0, 2), (2, 3))]
                keys = [[one.key for one in mine] for mine in wanted] + [[]]
                steps = [engine.decode(mine) for engine, mine in zip(engines[:size], keys, strict=False)]
                results = await asyncio.gather(*steps, return_exceptions=True)
                for mine, result in zip(wanted, results, strict=False):
                    for one, new in zip(mine, [] if isinstance(result, BaseException) else result, strict=False):
                        one.new += new
                if any(isinstance(result, BaseException) for result in results[:2]):
                    size = 2 if size == 3 else 3
                    if size == 3:
                        assert all(isinstance(result, Regrouping) for result in results)
                        await engines[2].close()
                        engines[2] = engine_of(2, 3, redundant=2)
                        await engines[2].start()
                    for engine in engines[:2]:
                        assert engine.group is not None
                        engine.group.stepped(is_broken=True)  # also who had done the step
                    generation += 1
                    await meet(engines[:size], generation)
            assert [one.new[: one.num_new] for one in kept] == alone[0::3] + alone[1::3]
            assert generation > 4
        finally:
            await close(engines)


async def prefilled(engines: Sequence[LocalEngine], rank: int, one: Asked) -> None:
    """A prompt computed at one rank, while the others serve it."""
    room = one.num_prompt + one.num_new + 8
    assert engines[rank].admit(one.key, room, one.sampling, bounded_prompt=one.num_prompt) is Admission.OK
    steps = [engine.prefill([Chunk(one.key, one.prompt)] if n == rank else []) for n, engine in enumerate(engines)]
    await asyncio.gather(*steps)


def countdown(patch: pytest.MonkeyPatch, group: Group, num_exchanges: int) -> None:
    """It ends at its so manieth exchange, or at the last one before that."""
    exchange, left = group._all_to_all, iter(range(num_exchanges))

    def counted(*args: Any) -> torch.Tensor:
        if next(left, None) is None:
            group.leave()
        return exchange(*args)

    patch.setattr(group, "_all_to_all", counted)


@once
async def test_each_rank_holds_its_share_of_the_experts() -> None:
    engines = await group_of(2)
    try:
        members = [engine.group for engine in engines]
        assert all(member is not None for member in members)
        assert [[places.tolist() for places in member.places][0] for member in members if member] == [
            [[0, 1, 2, 3], [4, 5, 6, 7]]
        ] * 2
        assert [engine.expert_bytes for engine in engines] == [ALL_BYTES // 2] * 2
    finally:
        await close(engines)


@once
async def test_places_are_taken_over_only_when_all_ranks_have_the_same_plan() -> None:
    engines = await group_of(2)
    first, second = (engine.group for engine in engines)
    assert first is not None and second is not None
    old = first.places
    one, other, double = shuffled(old, 1), shuffled(old, 2), [np.zeros_like(places) for places in old]
    double[0][:] = [[0, 0, 1, 2], [3, 4, 5, 6]]

    async def step() -> None:
        await asyncio.gather(*(engine.decode([]) for engine in engines))

    try:
        with pytest.raises(ValueError, match="of 10 layers, there are 11"):
            await first.rearrange(1, one[:10])
        with pytest.raises(ValueError, match=r"shape \(1, 8\), there are \(2, 4\)"):
            await first.rearrange(1, [places.reshape(1, -1) for places in one])
        with pytest.raises(ValueError, match="these are placed"):
            await first.rearrange(1, double)
        moving = [
            asyncio.create_task(first.rearrange(1, one)),
            asyncio.create_task(second.rearrange(1, other)),
        ]
        for _ in range(5):
            await step()
        moving.append(asyncio.create_task(second.rearrange(2, one)))  # the same places are not the same plan
        for _ in range(5):
            await step()
        assert max(first._lockstep.num_ahead, second._lockstep.num_ahead) <= 2
        assert first.version == second.version == 0 and not any(task.done() for task in moving)
        assert first.places[0].tolist() == old[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        moving.append(asyncio.create_task(first.rearrange(3, other)))  # of two plans the newer one counts
        moving.append(asyncio.create_task(second.rearrange(3, other)))
        moving.append(asyncio.create_task(second.rearrange(2, one)))
        while not all(task.done() for task in moving):
            await step()
        assert first.version == second.version == 3
        assert [places.tolist() for places in first.places] == [places.tolist() for places in other]
    finally:
        await close(engines)


@once
async def test_a_rank_that_is_gone_is_noticed() -> None:
    engines = await group_of(2, timeout_s=20.0)
    try:
        step = asyncio.create_task(engines[0].decode([]))
        await asyncio.sleep(0.05)
        assert not step.done()  # it waits for the other
        await engines[1].close()
        with pytest.raises(GroupError, match="rank 0 of 2: an exchange failed"):
            await step
        assert engines[0].group is not None and engines[0].group.is_broken and engines[0].group.size == 2
        await meet(engines[:1], 2)  # alone, with all experts
        assert await engines[0].decode([]) == [] and engines[0].expert_bytes == ALL_BYTES
    finally:
        await close(engines)


@once
async def test_of_a_meeting_that_not_all_come_to_nothing_is_left() -> None:
    group = Group(GroupSpec(0, 2, 20.0), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "MEET_S", 0.2)
        with pytest.raises(GroupError, match="rank 0 of 2: no meeting of all ranks"):
            group.meet(1, 0, 2, group.listen())
    with pytest.raises(GroupError, match="has not met the others"):
        group.agree([1])
    group.meet(2, 0, 1, "")
    assert group.agree([7]).tolist() == [[7]]


@once
async def test_a_meeting_that_fails_leaves_nothing_behind_and_one_that_fails_here_is_the_last() -> None:
    """Its first steps take a slot; the others are not kept waiting; what cannot be loaded now cannot be later."""
    engines = [engine_of(rank, 2) for rank in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    members = [engine.group for engine in engines]
    assert members[0] is not None and members[1] is not None
    try:
        with pytest.MonkeyPatch.context() as patch:
            countdown(patch, members[1]._group, len(members[1]._lockstep.layers) + 3)
            for result in await asyncio.gather(*meetings(engines, 1), return_exceptions=True):
                assert isinstance(result, GroupError)
        assert [members[0].is_broken, members[0]._group._is_met] == [True, False]
        await meet(engines[:1], 2)
        admissions = [engines[0].admit(f"r{n}", 8, Sampling(0.0, 1.0, 0)) for n in range(4)]
        assert admissions == [Admission.OK] * 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(members[0]._lockstep.layers[3], "load", lambda wanted: engines[7])
            with pytest.raises(RuntimeError, match="failed here: IndexError"):
                await meet(engines[:1], 3)
        assert [members[0].is_broken, members[0]._group._is_met] == [False, False]
    finally:
        await close(engines)


@once
async def test_a_rank_that_does_not_step_is_waited_for_no_longer_than_was_said() -> None:
    engines = await group_of(2, timeout_s=1.5)
    try:
        with pytest.raises(GroupError, match="Timed out"):
            await engines[0].decode([])
        await meet(engines, 2)
        waiting = asyncio.create_task(engines[0].decode([]))
        with pytest.raises(RuntimeError, match="failed here: ValueError"):  # of no use to the others any more
            await engines[1]._step(lambda steps: int("no number"))
        with pytest.raises(GroupError):
            await waiting
    finally:
        await close(engines)


@once
async def test_what_experts_were_asked_for_is_counted_once() -> None:
    engines = await group_of(2)
    try:
        for engine in engines:
            assert engine.group is not None
            engine.group.take_used()  # of the start
        engines[0].admit("r", 40, Sampling(0.0, 1.0, 0))
        prompt = np.arange(300, 317, dtype=np.uint32)
        await asyncio.gather(engines[0].prefill([Chunk("r", prompt)]), engines[1].prefill([]))
        mine, other = (engine.group.take_used() for engine in engines if engine.group)
        assert [int(used.sum()) for used in mine[:8]] == [17 * 2] * 8 and not any(used.any() for used in other)
        assert not any(used.any() for used in engines[0].group.take_used()) if engines[0].group else False
    finally:
        await close(engines)
