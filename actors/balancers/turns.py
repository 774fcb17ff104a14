"""Whose turn it is: who waits for room in decode, and who of them gets it first. Fair over tenants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from actors.balancers.ledger import Held, Replica
from schemas.routing import Route

FORGOTTEN_S = 2.0
"""Who has not asked again for so long has lost its turn. Who waits asks some ten times a second."""

PLACED_S = 0.25
"""Nor is room set aside for who has not asked again for so long: another balancer has found it a place, as a rule. With
two of them and 100 that wait for 64 slots, 94 % of the slots are in use, 95 % with one; at 2 s it is 85 %."""

NUM_FIRST = 32
"""The first of those that wait get the room there is. Others wait behind them unseen, so that a long queue costs
little."""


@dataclass(slots=True, eq=False)
class Wait:
    """Someone who asked in vain, last at `asked_s`, and has not been sent anywhere since. `number`: its place in the
    order of first asking. `num_passed`: so many younger ones got room before it, as their tenants held less.
    """

    route: Route
    asked_s: float
    number: int
    num_passed: int = 0
    is_waiting: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one request: those that are `before` it, NUM_FIRST at most, and then it is not its turn at all; of other
    tenants that are not, the first of each that asked earlier: they are `passed` when it gets room.
    """

    own: Wait
    before: list[Route]
    passed: list[Wait]

    @property
    def is_near(self) -> bool:
        return len(self.before) < NUM_FIRST


class Turns:
    """The next room is for the tenant that holds least, where all that come before it have got theirs; in a tenant,
    and among tenants that hold the same, for who asked first in vain.

    What a tenant holds is the worse of slots and tokens, of what was reserved here: an upper bound, whole outputs. All
    that a tenant holds ends at some time, so the oldest comes first in the end, unless younger ones of its tenant have
    found other room meanwhile. So that nobody is passed for ever: whom as many have passed as the replicas have slots,
    is before all others.
    """

    def __init__(self) -> None:
        self._waits: dict[str, dict[str, Wait]] = {}  # by tenant, in the order in which they first asked in vain
        self._num_known = 0

    def of(self, route: Route, replicas: Sequence[Replica], max_tokens: float, now_s: float) -> Turn:
        """Who is before a request that asks. `max_tokens`: the longest that a replica takes, 0 for any."""
        own = self._waits.get(route.tenant, {}).get(route.request_id)
        is_new = own is None
        own = own or Wait(route, now_s, self._num_known, is_waiting=False)
        queues = {tenant: self._in_line(tenant, own, now_s) for tenant in list(self._waits)}
        if is_new:
            queues[route.tenant] = chain(queues.get(route.tenant, ()), [own])
        heads = [(head, queue) for queue in queues.values() if (head := next(queue, None)) is not None]
        pool = _Pool(replicas, max_tokens, is_shared=len(heads) > 1)
        line = [(*pool.rank(head), head, queue) for head, queue in heads]
        heapify(line)
        before: list[Route] = []
        while len(before) < NUM_FIRST:
            *_, first, queue = heappop(line)
            if first is own:
                break
            before.append(first.route)
            pool.give(first.route)
            if (follower := next(queue, None)) is not None:
                heappush(line, (*pool.rank(follower), follower, queue))
        return Turn(own, before, [wait for *_, wait, _ in line if wait.number < own.number])

    def waits(self, turn: Turn, now_s: float) -> None:
        """It got nothing, and will ask again."""
        own = turn.own
        if own.number == self._num_known:
            self._num_known += 1
            self._waits.setdefault(own.route.tenant, {})[own.route.request_id] = own
        own.asked_s, own.is_waiting = now_s, True

    def goes(self, turn: Turn, now_s: float) -> None:
        """It was sent somewhere. It keeps its turn: it may be refused yet."""
        turn.own.asked_s, turn.own.is_waiting = now_s, False
        for wait in turn.passed:
            wait.num_passed += 1

    def _in_line(self, tenant: str, asks: Wait, now_s: float) -> Iterator[Wait]:
        """Those of a tenant that wait, and who asks now, the first first. Forgets those that asked too long ago."""
        waits = self._waits[tenant]
        for id, wait in list(waits.items()):
            if wait is asks or (wait.is_waiting and now_s - wait.asked_s <= PLACED_S):
                yield wait
            elif now_s - wait.asked_s > FORGOTTEN_S:
                del waits[id]
        if not waits:
            self._waits.pop(tenant, None)


class _Pool:
    """What tenants hold of the slots and tokens of all replicas, where there `is_shared` between several at all."""

    def __init__(self, replicas: Sequence[Replica], max_tokens: float, *, is_shared: bool) -> None:
        self._num_slots = max(1, sum(replica.report.capacity_requests for replica in replicas))
        self._num_tokens = max(1, sum(replica.report.capacity_tokens for replica in replicas))
        self._max_tokens, self._is_shared = max_tokens, is_shared
        self._held: dict[str, Held] = {}
        for replica in replicas if is_shared else ():
            for tenant, held in replica.held.items():
                self._held.setdefault(tenant, Held()).add(held.num_requests, held.num_tokens)

    def give(self, route: Route) -> None:
        """What is set aside for it, it holds."""
        self._held.setdefault(route.tenant, Held()).add(1, route.num_cached + route.num_new)

    def rank(self, wait: Wait) -> tuple[float, int]:
        """The least is first."""
        if wait.num_passed >= self._num_slots:
            return -1.0, wait.number
        held = self._held.get(wait.route.tenant)
        if not self._is_shared or held is None:
            return 0.0, wait.number
        longest = held.num_requests * self._max_tokens or held.num_tokens
        share = max(held.num_requests / self._num_slots, min(held.num_tokens, longest) / self._num_tokens)
        return share, wait.number
