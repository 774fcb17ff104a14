"""Whose prompt a prefill replica computes next, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from actors.prefill.batch import MOST_PASSED, Batch
from actors.prefill.job import Job
from actors.prefill.packing import AGED_SHARE, CHUNK_GRAIN, step_room
from actors.rules.cost import PUBLISHED, STEP_NS, Cost, step_terms
from actors.rules.meter import Meter
from kernels.engine import Admission, Sampling
from kernels.timed import TimedEngine
from tests.actors.builders import dispatch
from tests.actors.core import VOCABULARY, info

MILLION = 1 << 20
ZEROS = np.zeros(MILLION, dtype=np.uint32)
TURN = round(1 / AGED_SHARE)
"""The one that came first has a grain in so many steps, or more."""

Step = list[tuple[str, int]]


def job(id: str, num_tokens: int, tenant: str = "a") -> Job:
    return Job(structs.replace(dispatch(id, 1), tenant=tenant), ZEROS[:num_tokens])


class Shared(TimedEngine):
    """Has so many slots, and room for so many tokens in all of them together."""

    def __init__(self, num_slots: int = 16, capacity_tokens: int = 1 << 30) -> None:
        super().__init__(info(num_slots=num_slots, max_tokens=1 << 21), VOCABULARY)
        self.capacity_tokens = capacity_tokens

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        used = sum(request.num_reserved for request in self._requests._requests.values())
        if used + num_tokens > self.capacity_tokens:
            return Admission.LATER
        return super().admit(key, num_tokens, sampling, bounded_prompt=bounded_prompt)


@dataclass
class Replica:
    """A batch and its engine without anything else of a replica: steps take what they cost."""

    cost: Cost = PUBLISHED
    max_tokens: int = 16384
    engine: Shared = field(default_factory=Shared)
    now_ns: float = 0.0
    ended_ns: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = Batch(Meter(self.cost))

    def add(self, *jobs: Job) -> None:
        for each in jobs:
            self.batch.add(each)

    def step(self) -> Step:
        self.batch.admit(self.engine, 0)
        step = self.batch.next_step(self.max_tokens)
        terms = [each.chunk(len(chunk.tokens)) for each, chunk in step]
        if terms:
            self.now_ns += self.cost.ns(step_terms(terms))
        for each, chunk in step:
            each.num_done += len(chunk.tokens)
            if not each.num_left:
                self.batch.remove(each)
                self.engine.free(each.id)
                self.ended_ns[each.id] = self.now_ns
        return [(each.id, len(chunk.tokens)) for each, chunk in step]

    def steps(self, limit: int = 100_000) -> list[Step]:
        """Until nothing is left."""
        done: list[Step] = []
        while len(self.batch):
            done.append(self.step())
            assert len(done) < limit
        return done


costs = st.builds(
    Cost,
    step_ns=st.sampled_from([0.0, 1e6, 36.7e6, 150e6, 500e6]),
    token_ns=st.sampled_from([0.0, 50.5e3, 1e6, 5e6]),
    pair_ns=st.sampled_from([0.0, 0.134, 100.0]),
    block_ns=st.just(0.0),
    tail_token_ns=st.sampled_from([0.0, 1e6]),
    tail_pair_ns=st.sampled_from([0.0, 10.0]),
    context_ns=st.sampled_from([0.0, 1e3]),
)
arrivals = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6000), st.sampled_from("abc")), min_size=1, max_size=12)


@given(arrivals, costs, st.sampled_from([128, 300, 512, 2048]), st.integers(1, 4))
def test_whatever_comes_steps_keep_their_budget_and_everyone_gets_on(
    coming: list[tuple[int, int, str]], cost: Cost, max_tokens: int, num_slots: int
) -> None:
    replica = Replica(cost, max_tokens, Shared(num_slots))
    room, sizes = step_room(cost, max_tokens), {f"j{i}": size for i, (_, size, _) in enumerate(coming)}
    done = dict.fromkeys(sizes, 0)
    waited, num_steps = dict.fromkeys(sizes, 0), 0
    due = [(after, job(f"j{i}", size, tenant)) for i, (after, size, tenant) in enumerate(coming)]
    while due or len(replica.batch):
        replica.add(*(each for after, each in due if after <= num_steps))
        due = [(after, each) for after, each in due if after > num_steps]
        jobs, began_ns = {each.id: each for each in replica.batch}, replica.now_ns
        step = replica.step()
        assert step or not jobs
        took_ns = replica.now_ns - began_ns - (cost.step_ns if step else 0)
        num_tokens = sum(num for _, num in step)
        if len(step) > 1 or num_tokens > CHUNK_GRAIN:
            assert num_tokens <= max_tokens
            assert took_ns <= room.ns * (1 + 1e-9) + 1
        for id, num in step:
            done[id] += num
            assert num > 0 and (done[id] == sizes[id] or done[id] % CHUNK_GRAIN == 0)
        running = [id for id, each in jobs.items() if each.is_admitted]
        for id in running:
            waited[id] = 0 if id in dict(step) or id != running[0] else waited[id] + 1
            assert waited[id] < TURN
        num_steps += 1
        assert num_steps < 10_000
    assert done == sizes


def test_small_requests_of_one_tenant_are_computed_as_they_come() -> None:
    replica = Replica()
    replica.add(*(job(f"j{i:02}", 400 + i % 7) for i in range(40)))
    num_steps = len(replica.steps())
    order = [int(id[1:]) for id in replica.ended_ns]
    assert num_steps == 5, "eight fill a step"
    assert max(abs(place - number) for place, number in enumerate(order)) < 16, "no further than there are slots"


def test_a_million_tokens_make_chat_wait_for_two_steps_at_most() -> None:
    replica = Replica()
    replica.add(job("long", MILLION))
    while (long := replica.batch.get("long")) is not None:
        chat = job(f"c{replica.now_ns}", 1000)
        before = long.num_done
        replica.step()
        replica.add(chat)  # while that step was under way
        replica.step()
        assert chat.num_left == 0 and long.num_done > before


@pytest.mark.parametrize("token_ns", [50.5e3, 5e6])  # in the time of a step: 25 grains, and not even one
def test_under_a_flood_of_chat_a_million_tokens_still_get_their_share(token_ns: float) -> None:
    replica, number, num_flooded = Replica(replace(PUBLISHED, token_ns=token_ns)), 0, 0
    replica.add(long := job("long", MILLION))
    for _ in range(20 * TURN):
        while len(replica.batch) < 60:
            replica.add(job(f"c{number}", 1500))
            number += 1
        num_flooded += "long" not in dict(replica.step())
    assert long.num_done >= 20 * CHUNK_GRAIN, "not only in the steps that others leave"
    assert num_flooded < 20 * TURN


@pytest.mark.parametrize("size", [1000, 20_000])
def test_the_flood_of_a_tenant_delays_one_request_of_another_by_its_own_time_and_a_step(size: int) -> None:
    def alone() -> float:
        replica = Replica()
        replica.add(job("one", size, "b"))
        replica.steps()
        return replica.ended_ns["one"]

    replica = Replica()
    replica.add(*(job(f"f{i}", 5000, "a") for i in range(300)))
    for _ in range(20):
        replica.step()
    began_ns = replica.now_ns
    replica.add(job("one", size, "b"))
    while "one" not in replica.ended_ns:
        replica.step()
    # A slot is free when one of the flood has ended: shorter ones first, two at most.
    assert replica.ended_ns["one"] - began_ns <= 2 * alone() + 4 * STEP_NS


def test_a_tenant_that_was_away_has_not_saved_up_turns() -> None:
    replica = Replica()
    replica.add(*(job(f"a{i}", 3000, "a") for i in range(40)))
    for _ in range(20):
        replica.step()
    replica.add(*(job(f"b{i}", 3000, "b") for i in range(20)))
    for _ in range(20):
        replica.step()
    ended = [sum(id.startswith(tenant) for id in replica.ended_ns) for tenant in "ab"]
    assert 6 <= ended[1] <= 12 and ended[0] + ended[1] >= 36


def test_who_comes_anew_begins_with_the_others_and_not_behind_one_that_was_given_more_as_it_was_first() -> None:
    replica, number = Replica(engine=Shared(num_slots=64)), 0
    replica.add(job("long", MILLION, "long"))
    for _ in range(200):
        waiting = {each.tenant for each in replica.batch}
        others = {f"t{i}" for i in range(40)} - waiting
        replica.add(*(job(f"{tenant}-{number}", 4000, tenant) for tenant in sorted(others)))
        number += 1
        replica.step()
    began_ns = replica.now_ns
    replica.add(job("new", 1000, "new"))
    while "new" not in replica.ended_ns:
        replica.step()
    assert replica.ended_ns["new"] - began_ns < 4 * STEP_NS


class TestSlots:
    """Who has one of the engine."""

    def ids(self, jobs: Sequence[Job]) -> list[str]:
        return [each.id for each in jobs]

    def test_long_requests_have_half_of_them(self) -> None:
        replica = Replica(engine=Shared(num_slots=4))
        replica.add(*(job(f"l{i}", 100_000) for i in range(6)))
        assert self.ids(replica.batch.admit(replica.engine, 0)[0]) == ["l0", "l1"]
        replica.add(job("c", 100))
        assert self.ids(replica.batch.admit(replica.engine, 0)[0]) == ["c"]
        replica.steps()
        assert len(replica.ended_ns) == 7

    def test_with_those_that_wait_for_decode_they_are_twice_the_slots_at_most(self) -> None:
        replica = Replica(engine=Shared(num_slots=4))
        replica.add(*(job(f"c{i}", 100) for i in range(6)))
        assert replica.batch.admit(replica.engine, 8) == ([], [])
        assert self.ids(replica.batch.admit(replica.engine, 7)[0]) == ["c0"]
        assert self.ids(replica.batch.admit(replica.engine, 0)[0]) == ["c1", "c2", "c3"]

    def test_one_that_has_no_room_lets_others_pass_but_not_for_ever(self) -> None:
        replica, number, passed = Replica(engine=Shared(4, capacity_tokens=MILLION)), 0, 0
        replica.add(job("before", 2000), job("huge", MILLION - 500))
        assert self.ids(replica.batch.admit(replica.engine, 0)[0]) == ["before"]
        while not (huge := replica.batch.get("huge")) or not huge.is_admitted:
            while len(replica.batch) < 8:  # there is always another one
                replica.add(job(f"c{number}", 1500))
                number += 1
            passed = len(replica.ended_ns)
            replica.step()
            assert replica.now_ns < 100 * STEP_NS
        assert 4 < passed <= 2 * MOST_PASSED + 8

    def test_of_equals_the_one_that_came_first_also_when_costs_are_fitted_anew(self) -> None:
        replica = Replica(engine=Shared(num_slots=1))
        replica.add(job("a", 1000))
        replica.batch.meter.cost = Cost(step_ns=1.0, token_ns=1.0, pair_ns=0.0, block_ns=0.0)
        replica.add(job("b", 1000), job("c", 1000))
        assert [step[0][0] for step in replica.steps()] == ["a", "b", "c"]

    def test_one_that_is_gone_is_not_given_any(self) -> None:
        replica = Replica(engine=Shared(num_slots=1))
        jobs = [job(id, 100, tenant) for id, tenant in (("a", "t"), ("b", "u"), ("c", "t"))]
        replica.add(*jobs)
        replica.batch.remove(jobs[1])
        replica.batch.remove(jobs[1])
        assert [step[0][0] for step in replica.steps()] == ["a", "c"]
