"""Whose turn it is: tenants get equal time, in each the shortest job is first; beside that, the order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import frexp

from actors.prefill.job import Job
from actors.rules.cost import PUBLISHED

SHORT_NS = 100e6
"""Of requests with less work nobody is shorter: half a step."""


def size(work_ns: float) -> int:
    """Who has twice the work, or more, is larger; 0 for all that are short."""
    return max(0, frexp(work_ns / SHORT_NS)[1])


class Turns:
    """Time that tenants were given (start-time fair queueing). One that was away begins where those who stayed are, so
    being away earns it nothing, and costs it nothing."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_jobs: dict[str, int] = {}
        self._now = 0.0

    def join(self, tenant: str) -> None:
        """It has one more job here."""
        if not self._num_jobs:
            self._served.clear()
            self._now = 0.0
        if tenant not in self._num_jobs:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._now)
        self._num_jobs[tenant] = self._num_jobs.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """It has one job less."""
        self._num_jobs[tenant] -= 1
        if not self._num_jobs[tenant]:
            del self._num_jobs[tenant]
            gone = [one for one, served in self._served.items() if one not in self._num_jobs and served <= self._now]
            for one in gone:
                del self._served[one]

    def charge(self, tenant: str, ns: float) -> None:
        """It was given so much."""
        self._served[tenant] += ns

    def served(self, tenant: str) -> float:
        """What counts as given to a tenant that is here. The least is next."""
        return self._served[tenant]

    def order(self, jobs: Iterable[tuple[float, Job]]) -> Iterator[Job]:
        """All these jobs, given their nanoseconds left, as they follow one another. A tenant counts as served with each
        of its jobs that has been named. The one that is first says where those begin that come: not one that was given
        more because it was here first."""
        lines: dict[str, list[tuple[int, int, float, Job]]] = {}
        for left_ns, job in jobs:
            lines.setdefault(job.tenant, []).append((size(left_ns), job.number, left_ns, job))
        for line in lines.values():
            heapify(line)
        heads = [(self.served(tenant), tenant) for tenant in lines]
        heapify(heads)
        if heads:
            self._now = max(self._now, heads[0][0])
        while heads:
            served, tenant = heappop(heads)
            _, _, left_ns, job = heappop(lines[tenant])
            yield job
            if lines[tenant]:
                heappush(heads, (served + left_ns, tenant))


_Place = tuple[bool, int, int]
"""Of a job among its tenant's: whether it is long, its size, its number."""


class Waiting:
    """Jobs that wait for a slot of the engine; some are long, and would keep it from others.

    Slots go alternately to the one that came first, and to the shortest of the tenant that was given least. How long
    it is, is asked of the published cost: equal requests keep their order when the replica's own is fitted anew.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._jobs: dict[int, tuple[Job, _Place]] = {}
        self._by_age: tuple[list[int], list[int]] = ([], [])  # short, long
        self._by_tenant: dict[str, list[_Place]] = {}
        self._is_by_age = True

    def push(self, job: Job, *, is_long: bool) -> None:
        """It waits from now on, where its number puts it."""
        place = is_long, size(job.left_ns(PUBLISHED)), job.number
        self._jobs[job.number] = job, place
        insort(self._by_age[is_long], job.number)
        insort(self._by_tenant.setdefault(job.tenant, []), place)

    def remove(self, job: Job) -> None:
        """It does not, any more. Idempotent."""
        if job.number not in self._jobs:
            return
        _, place = self._jobs.pop(job.number)
        by_age, line = self._by_age[place[0]], self._by_tenant[job.tenant]
        del by_age[bisect_left(by_age, job.number)]
        del line[bisect_left(line, place)]
        if not line:
            del self._by_tenant[job.tenant]

    def pop(self, *, may_be_long: bool) -> tuple[Job, bool] | None:
        """The next one, and whether it is long, which only some may be. None if there is none."""
        lines = [line for line in self._by_age[: 1 + may_be_long] if line]
        if not lines:
            return None
        number = min(line[0] for line in lines)
        if not self._is_by_age:
            heads = [
                (self._turns.served(tenant), *line[0][1:])
                for tenant, line in self._by_tenant.items()
                if may_be_long or not line[0][0]
            ]
            number = min(heads)[2]
        self._is_by_age = not self._is_by_age
        return self._take(number)

    def pop_oldest(self) -> tuple[Job, bool]:
        """The one that came first, however long; there must be one."""
        return self._take(min(line[0] for line in self._by_age if line))

    def oldest(self) -> Job | None:
        """The one that came first."""
        numbers = [line[0] for line in self._by_age if line]
        return self._jobs[min(numbers)][0] if numbers else None

    def _take(self, number: int) -> tuple[Job, bool]:
        job, place = self._jobs[number]
        self.remove(job)
        return job, place[0]
