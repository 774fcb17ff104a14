"""What one step computes: a budget of time, shared between the request that has waited longest and the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.prefill.job import Job
from actors.prefill.order import Turns
from actors.rules.chain import BLOCK_TOKENS
from actors.rules.cost import STEP_NS, Cost

CHUNK_GRAIN = BLOCK_TOKENS
"""Chunks of a cut prompt are multiples of this (the block size), so that blocks fill at step ends."""

AGED_SHARE = 1 / 16
"""Of a step, at most, for the request that has waited longest when others want to be computed, too. With published
costs, and chat at 30 to 70 % of what a replica can do, a million tokens amid it make the 99th percentile of its waiting
1.4 to 1.5 times what it is without them; at 1/8 that is 1.5 to 1.8, at 1/2 its queue grows as long as they are here."""

MORE_TO_END, MORE_TO_GO_ON = 1.0, 0.25
"""By so much of what it takes already a step in which requests end is made longer, at most, for another one that ends
in it, and for one that does not. The shortest would else wait for work that is not theirs: slowdowns of 6.1 at the
99th percentile in the place of 4.5 (balancers/README.md). Many of a size still fill a step together."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of a step: nanoseconds, beside what every step takes, and tokens."""

    ns: float
    num_tokens: int

    def part(self, share: float) -> Room:
        """So much of it."""
        return Room(self.ns * share, int(self.num_tokens * share))

    def without(self, job: Job, num_tokens: int, cost: Cost) -> Room:
        """What is left when so many tokens of a job are computed."""
        return Room(self.ns - chunk_ns(job, num_tokens, cost), self.num_tokens - num_tokens)

    def beside(self, ending_ns: float, job: Job, cost: Cost) -> int:
        """The most of a job's next tokens in a step that takes `ending_ns` for those that end in it, 0 for none."""
        num_tokens = self.most(job, cost)
        if not ending_ns or not num_tokens:
            return num_tokens
        if num_tokens == job.num_left and chunk_ns(job, num_tokens, cost) <= MORE_TO_END * ending_ns:
            return num_tokens
        return replace(self, ns=min(self.ns, MORE_TO_GO_ON * ending_ns)).most(job, cost)

    def most(self, job: Job, cost: Cost) -> int:
        """The most of a job's next tokens that fit: all that it wants, or up to a multiple of the grain, or none."""
        wanted = job.num_at_once
        if wanted <= self.num_tokens and chunk_ns(job, wanted, cost) <= self.ns:
            return wanted
        num_tokens = min(wanted - 1, self.num_tokens, cost.most_tokens(self.ns, job.num_done))
        while (num_tokens := _whole(job, num_tokens)) > 0 and chunk_ns(job, num_tokens, cost) > self.ns:
            num_tokens -= 1  # some of the last window is in it
        return max(num_tokens, 0)


def step_room(cost: Cost, max_tokens: int) -> Room:
    """Of an empty step. Where what every step takes is more than half of STEP_NS, as much again is computed."""
    return Room(max(STEP_NS - cost.step_ns, cost.step_ns), max_tokens)


def chunk_ns(job: Job, num_tokens: int, cost: Cost) -> float:
    """What the next `num_tokens` of a job add to a step."""
    return cost.ns(job.chunk(num_tokens)) - cost.step_ns if num_tokens else 0.0


def least(job: Job) -> int:
    """The smallest chunk of a job: to the next multiple of the grain."""
    return min(job.num_at_once, CHUNK_GRAIN - job.num_done % CHUNK_GRAIN)


class Packing:
    """Packs steps one after the other.

    A step has two lanes. The request that came first is given at most AGED_SHARE of it as long as others want some, and
    what it could not use, as not even one grain fitted, it is owed. The rest is for all by turns, the last one cut at
    the grain. Each step computes one grain at least, so there is progress whatever the budget.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._num_owed = 0  # steps in a row without anything for the one that came first

    def next_step(self, jobs: Sequence[Job], cost: Cost, max_tokens: int) -> list[tuple[Job, int]]:
        """The chunks of a step: how many tokens of which of these jobs, which have engine slots and are in order of
        arrival. At most `max_tokens` together, if that is a grain."""
        jobs = [job for job in jobs if job.num_left]
        if not jobs:
            return []
        room, oldest = step_room(cost, max_tokens), jobs[0]
        share = min(1.0, AGED_SHARE * (1 + self._num_owed)) if len(jobs) > 1 else 1.0
        num_tokens = room.part(share).most(oldest, cost)
        if not num_tokens and share == 1.0:
            num_tokens = least(oldest)
        chunks = {oldest.number: (oldest, num_tokens)} if num_tokens else {}
        self._by_turns(jobs, chunks, room.without(oldest, num_tokens, cost), cost)
        self._num_owed = 0 if oldest.number in chunks else self._num_owed + 1
        for job, num_tokens in chunks.values():
            self._turns.charge(job.tenant, chunk_ns(job, num_tokens, cost))
        return list(chunks.values())

    def _by_turns(self, jobs: Sequence[Job], chunks: dict[int, tuple[Job, int]], room: Room, cost: Cost) -> None:
        """Fill the room that is left; what the one that came first has in it may become more."""
        ending_ns = 0.0
        for job in self._turns.order((job.left_ns(cost), job) for job in jobs):
            _, given = chunks.get(job.number, (job, 0))
            if given < job.num_at_once:
                room = Room(room.ns + chunk_ns(job, given, cost), room.num_tokens + given)
                num_tokens = max(given, room.beside(ending_ns + cost.step_ns if ending_ns else 0.0, job, cost))
                num_tokens = num_tokens or (0 if chunks else least(job))
                if num_tokens:
                    chunks[job.number] = (job, num_tokens)
                    room = room.without(job, num_tokens, cost)
                if num_tokens < job.num_at_once:
                    break
            if job.num_at_once == job.num_left:
                ending_ns += chunk_ns(job, job.num_left, cost)


def _whole(job: Job, num_tokens: int) -> int:
    """So many or fewer, up to a multiple of the grain."""
    return (job.num_done + num_tokens) // CHUNK_GRAIN * CHUNK_GRAIN - job.num_done
