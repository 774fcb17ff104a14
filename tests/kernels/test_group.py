"""Engines in an expert-parallel group: the tokens of one engine, whatever the places of experts, and ends in time."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kernels import local as local_engine
from kernels.engine import Admission, Chunk, GroupError, Sampling
from kernels.group import Group, GroupSpec
from kernels.local import LocalEngine
from kernels.places import Places
from tests.kernels.test_local_drafts import AnySchedule
from tests.untrained import untrained

CHUNK = 64


def once(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """On one loop: what is tested is the same on both, and takes its time."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def group_of(size: int, *, timeout_s: float = 30.0, redundant: int = 0) -> list[LocalEngine]:
    address = f"127.0.0.1:{free_port()}"
    specs = [GroupSpec(rank, size, address, timeout_s, redundant) for rank in range(size)]
    engines = [
        LocalEngine(untrained(), num_slots=4, max_step_tokens=512, group=spec if size > 1 else None) for spec in specs
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
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
async def test_each_rank_holds_its_share_of_the_experts() -> None:
    engines = await group_of(2)
    try:
        members = [engine.group for engine in engines]
        assert all(member is not None for member in members)
        assert [[places.tolist() for places in member.places][0] for member in members if member] == [
            [[0, 1, 2, 3], [4, 5, 6, 7]]
        ] * 2
        num_bytes = (8 * 8 + 3 * 4) * 3 * 64 * 128 * 4  # experts of layers and stages, matrices, fp32
        assert [engine.expert_bytes for engine in engines] == [num_bytes // 2] * 2
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
async def test_a_rank_that_is_gone_is_noticed_and_one_that_never_comes_is_too() -> None:
    engines = await group_of(2, timeout_s=20.0)
    try:
        step = asyncio.create_task(engines[0].decode([]))
        await asyncio.sleep(0.05)
        assert not step.done()  # it waits for the other
        await engines[1].close()
        with pytest.raises(GroupError, match="rank 0 of 2 at .*: an exchange failed"):
            await step
        assert engines[0].group is not None and engines[0].group.is_broken
    finally:
        await close(engines)
    spec = GroupSpec(0, 2, f"127.0.0.1:{free_port()}", 20.0, meet_s=0.2)
    lonely = LocalEngine(untrained(), num_slots=1, max_step_tokens=64, group=spec)
    with pytest.raises(GroupError, match="no meeting of all ranks"):
        await lonely.start()
    await lonely.close()


@once
async def test_who_starts_anew_meets_the_others_when_they_do_too() -> None:
    address = f"127.0.0.1:{free_port()}"

    def group(rank: int) -> Group:
        return Group(GroupSpec(rank, 2, address, 20.0, meet_s=30.0), torch.device("cpu"))

    async def meet(*groups: Group) -> None:
        await asyncio.gather(*(asyncio.to_thread(one.join) for one in groups))

    first, second = group(0), group(1)
    await meet(first, second)
    assert first.lives == second.lives and first.generation == second.generation > 0
    second.leave()
    again = group(1)
    joining = asyncio.create_task(meet(again))
    await asyncio.sleep(0.1)
    assert not joining.done()  # rank 0 has met with an earlier life of it
    first.leave()
    other = group(0)
    await asyncio.gather(meet(other), joining)
    assert other.lives == again.lives and all(now > then for now, then in zip(other.lives, first.lives, strict=True))
    said = await asyncio.gather(asyncio.to_thread(other.agree, [7]), asyncio.to_thread(again.agree, [8]))
    assert [one.tolist() for one in said] == [[[7], [8]]] * 2
    again.leave()
    other.leave()


@once
async def test_a_rank_that_does_not_step_is_waited_for_no_longer_than_was_said() -> None:
    engines = await group_of(2, timeout_s=1.5)
    try:
        with pytest.raises(GroupError, match="Timed out"):
            await engines[0].decode([])
        with pytest.raises(GroupError, match="failed here: ValueError"):  # not of one request: the others have gone on
            await engines[1]._step(lambda steps: int("no number"))
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
