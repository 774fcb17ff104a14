"""Prefill: which replica gets the next prompt. By time: what it has to do, and what this costs there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from actors.balancers.choice import Full, TooLate
from actors.balancers.ledger import Replica
from actors.rules.cost import STEP_NS
from schemas.routing import Route

RAMP_S = 10.0
RAMP_START = 0.25
"""A replica heard of for less than RAMP_S counts as slower, by this factor at first: its costs are those of a few
dummy prompts, its caches are cold, and many balancers see it empty at once. It takes five heartbeats to be known."""

EQUAL_PART = 0.25
"""Ends that differ by less than this part of the request's own time are equal, and then whoever has been out of work
longest gets it. Else the fastest of the idle would always be first: 1.25 times as busy as the mean at 80 % load, and
2.4 times at 40 %. This way it is 1.02 and 1.14 times, and no percentile is worse (replicas that differ by 10 %)."""

MAX_WAIT_S = 240.0
"""Queueing longer than this is hopeless, also without a deadline. Both official SDKs give up after 600 s: this leaves
two minutes to compute the longest prompt, and four to answer."""


class ComputeQuota:
    """The replica that would be done first: argmin of (wait + cost) / ramp, in the replica's own nanoseconds.

    Replicas compute the least first, so a request waits for as much of each other as it takes itself, not for all that
    is outstanding: a short one may go where a long one is, a long one goes where there is least to do.

    Whose work waits there does not matter to the choice. It matters to whether there is one: tenants are served in
    turns (see prefill). When even so, and anywhere, it would wait past its deadline, or for MAX_WAIT_S, the request is
    refused: the tenant that floods is refused first. So is what no replica, full or not, could compute by its deadline
    if it had nothing else to do: no time to come again is given for that.

    `seed` decides among equals, differently in each balancer, so that several do not fill the same one first.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._ranks: dict[str, bytes] = {}

    def __call__(self, replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
        scores, room_s, least_s = [], _room_s(route, now_ns), math.inf
        for replica in replicas:
            cost_s = replica.cost_ns(route) / 1e9
            least_s = min(least_s, cost_s)
            if replica.is_full or cost_s > room_s:
                continue
            end_s = (wait_s(replica, cost_s, now_s) + cost_s) / ramp(now_s - replica.since_s)
            scores.append((end_s, cost_s, replica))
        if room_s <= 0:
            raise TooLate("the deadline of the request has passed")
        if least_s > room_s:
            raise TooLate(f"computing it takes about {_seconds(least_s)}, its deadline leaves {_seconds(room_s)}")
        if not scores:
            fit = "" if math.isinf(room_s) else " that can compute it in time"
            raise Full(f"all prefill replicas{fit} are full")
        first_s, cost_s, _ = min(scores, key=lambda score: score[0])
        equals = [score for score in scores if score[0] <= first_s + EQUAL_PART * cost_s]
        _, cost_s, best = min(equals, key=lambda score: self._order(score[2]))
        most_s = min(MAX_WAIT_S, room_s - cost_s)
        if best.left_s(now_s) > most_s and fair_wait_s(best, route.tenant, cost_s, now_s) > most_s:
            return _soonest([(cost_s, replica) for _, cost_s, replica in scores], route, now_s, room_s)
        return best

    def _order(self, replica: Replica) -> tuple[float, bytes]:
        """Among equals: who is out of work first, or has been longest."""
        rank = self._ranks.get(replica.id)
        if rank is None:
            rank = hashlib.blake2b(f"{self._seed}\0{replica.id}".encode(), digest_size=8).digest()
            self._ranks[replica.id] = rank
        return replica.free_s, rank


def _room_s(route: Route, now_ns: int) -> float:
    """How long it is until its deadline; negative when that is over."""
    return (route.deadline_ns - now_ns) / 1e9 if route.deadline_ns else math.inf


def _soonest(costs: Sequence[tuple[float, Replica]], route: Route, now_s: float, room_s: float) -> Replica:
    """Where it would be done first as tenants are served in turns, given what it costs where. Raises Full if even that
    is too late."""
    waits = [(fair_wait_s(replica, route.tenant, cost_s, now_s), cost_s, replica) for cost_s, replica in costs]
    before_s, cost_s, best = min(waits, key=lambda wait: wait[0] + wait[1])
    most_s = min(MAX_WAIT_S, room_s - cost_s)
    if before_s > most_s:
        why = "is hopeless" if most_s == MAX_WAIT_S else "is later than its deadline allows"
        raise Full(f"to wait {before_s:.1f} s for prefill {why}", before_s - most_s)
    return best


def _seconds(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s >= 1 else f"{time_s:.2g} s"


def ramp(age_s: float) -> float:
    """How fast a replica counts that has been heard of for so long, as a part of its speed."""
    return min(1.0, RAMP_START + (1.0 - RAMP_START) * age_s / RAMP_S)


def wait_s(replica: Replica, cost_s: float, now_s: float) -> float:
    """How long a request that takes `cost_s` waits there: for the step under way, and for as much of each other as it
    takes itself; at most for all.

    Of its own reservations a balancer knows how long each takes, of others' how many there are and what is left.
    """
    left_s = replica.left_s(now_s)
    if not left_s:
        return 0.0
    most_ns, own_ns, before_ns = cost_s * 1e9, 0.0, 0.0
    for held in replica.reserved.values():
        own_ns += held.ns
        before_ns += min(held.ns, most_ns)
    num_others = replica.num_requests - len(replica.reserved)
    before_ns += min(max(0.0, left_s * 1e9 - own_ns), num_others * most_ns)
    before_ns = min(before_ns, replica.num_unfinished * most_ns)  # some may only wait to be handed over
    return min(left_s, (before_ns + STEP_NS) / 1e9)


def fair_wait_s(replica: Replica, tenant: str, cost_s: float, now_s: float) -> float:
    """How long a request of `tenant` that takes `cost_s` waits there, when tenants are served in turns and the least of
    each first: for as much of each request of its own as it takes itself, and for as much of each other tenant's work
    as of all that; at most for all."""
    left_s = replica.left_s(now_s)
    if not left_s:
        return 0.0
    by_tenant = dict(replica.work.remaining_ns)
    for held in replica.on_the_way():
        by_tenant[held.route.tenant] = by_tenant.get(held.route.tenant, 0.0) + held.ns
    own_ns = by_tenant.pop(tenant, 0.0)
    others = [ns for ns in by_tenant.values() if ns > 0]
    own_s = left_s * own_ns / (own_ns + sum(others)) if own_ns else 0.0
    before_s = min(own_s, replica.num_unfinished * cost_s)
    return min(left_s, (1 + len(others)) * (before_s + cost_s) - cost_s)
