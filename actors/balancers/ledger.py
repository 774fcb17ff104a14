"""What a balancer knows of its replicas: their own reports, and the reservations it made since.

The replica's ledger is the truth. A reservation counts from the moment it is made, so a burst between two reports is
spread; it is dropped when released, when its replica is gone, or when a report that should know it does not. While no
reports come, a reservation lives for a lease.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from actors.rules.cost import Cost, Work
from actors.rules.load import PrefillLoad
from actors.rules.owner import EXPIRY_S
from schemas.message import Role
from schemas.routing import LoadReported, Route

SETTLE_S = 10.0
"""A reservation this old that its replica's report does not list is over (its release was lost)."""

FORGET_S = 60.0
"""A replica silent for so long, while others report, will not come back: longer than any pause of the bus, or a
worker's restart, whose counters are worth keeping."""

LEASE_S = 60.0
LEASE_FACTOR = 4.0
"""A reservation of a silent replica is over after LEASE_S, the longest that a hand-over may wait, and so many times as
long as it was expected to take: its release was lost, and no report comes to say so."""

_NO_TIME = PrefillLoad(cost=Cost(0.0, 0.0, 0.0, 0.0))
"""Of pools whose reports do not speak of time."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Work on its way to a replica, or there, since `made_s`: `ns` of it, expected to be done at `end_s`."""

    route: Route
    made_s: float
    ns: float = 0.0
    end_s: float = 0.0

    def is_lapsed(self, now_s: float) -> bool:
        """Its replica should have released it long ago. Never where nobody knows how long it takes."""
        return self.ns > 0 and now_s - self.made_s > LEASE_S + LEASE_FACTOR * (self.end_s - self.made_s)


@dataclass(slots=True)
class Held:
    """Requests of one tenant and their tokens: of prompts, cached or not, and of whole outputs."""

    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        """Less, if negative."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens


@dataclass(slots=True)
class Replica:
    """One data-parallel rank as the balancer sees it: its last report, heard at `seen_s`, and what was reserved since.

    `since_s`: when this incarnation was first heard of. `reported`: what its report lists and is not released yet.
    `reserved`: own reservations, of which its report does not know those that are `coming`; `held`: all of them, by
    tenant. `work`: what its report says of nanoseconds. `free_s`: when it will be out of work, or has been since: what
    it reported and what was reserved since, worked off one after the other; of that, `coming_ns` are coming.
    `refused_s`: when it last failed to take what was routed to it.
    """

    report: LoadReported
    seen_s: float
    since_s: float
    reported: set[int]
    reserved: dict[int, Reservation] = field(default_factory=dict)
    coming: dict[int, Reservation] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    work: PrefillLoad = _NO_TIME
    free_s: float = 0.0
    coming_ns: float = 0.0
    refused_s: float = float("-inf")

    @property
    def id(self) -> str:
        return self.report.id

    @property
    def num_requests(self) -> int:
        """Requests there or on their way, each counted once."""
        return len(self.reported) + len(self.coming)

    @property
    def num_unfinished(self) -> int:
        """Those that are not yet computed: the others only wait to be handed over."""
        return min(self.num_requests, self.report.num_running + self.report.num_waiting + len(self.coming))

    @property
    def is_full(self) -> bool:
        """It holds as many requests as it ever can."""
        return self.num_requests >= self.report.capacity_requests

    def on_the_way(self) -> Iterable[Reservation]:
        """Own reservations that its report does not know yet."""
        return self.coming.values()

    def hold(self, reservation: int, made: Reservation) -> None:
        """It was reserved, and is on its way."""
        self.reserved[reservation] = self.coming[reservation] = made
        self.held.setdefault(made.route.tenant, Held()).add(1, made.route.num_cached + made.route.num_new)

    def drop(self, reservation: int) -> Reservation:
        """It is over. What is `coming` is the caller's to set right."""
        made = self.reserved.pop(reservation)
        held = self.held[made.route.tenant]
        held.add(-1, -made.route.num_cached - made.route.num_new)
        if not held.num_requests:
            del self.held[made.route.tenant]
        return made

    def left_s(self, now_s: float) -> float:
        """Seconds of work there and on its way.

        What is not released is at most half done: without it, a balancer that hears no reports and shares its
        replicas with others would take them for idle, and never notice one that is slow.
        """
        return max(0.0, self.free_s - now_s, self.coming_ns / 2e9)

    def cost_ns(self, route: Route) -> float:
        """What a request takes there, alone."""
        counts = route.num_new, route.num_cached, route.num_replayed, route.num_blocks
        return self.work.cost.work_ns(Work(*counts, is_exact=route.is_exact))

    def is_held_back(self, now_s: float) -> bool:
        """It failed to take work, and has not reported since."""
        return now_s - self.refused_s < EXPIRY_S


class Ledger:
    """Replicas and reservations of one pool. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._holder: dict[int, str] = {}
        self._heard_s = self._thawed_s = float("-inf")

    def report(self, report: LoadReported, now_s: float) -> None:
        """Take a replica's own word. Late reports of the same incarnation are ignored.

        Replicas not heard of for FORGET_S are taken for lost.
        """
        if self.is_frozen(now_s):
            self._thawed_s = now_s
        self._heard_s = now_s
        for gone in [r.id for r in self._replicas.values() if self._silence_s(r, now_s) >= FORGET_S]:
            self.lost(gone)
        known = self._replicas.get(report.id)
        if known is not None and known.report.incarnation != report.incarnation:
            self.lost(report.id)
            known = None
        if known is None:
            known = Replica(report, now_s, now_s, set(), free_s=now_s)
            self._replicas = dict(sorted([*self._replicas.items(), (report.id, known)]))
        elif report.seq <= known.report.seq:
            return
        self._update(known, report, now_s)

    def _update(self, replica: Replica, report: LoadReported, now_s: float) -> None:
        reported = set(report.reservations)
        for id, held in list(replica.reserved.items()):
            # What it listed and does not any more is over; what it never listed may still be on its way.
            if id not in reported and (id in replica.reported or now_s - held.made_s > SETTLE_S):
                replica.drop(id)
                del self._holder[id]
        replica.report, replica.seen_s, replica.reported = report, now_s, reported
        replica.refused_s = float("-inf")
        replica.coming = {id: held for id, held in replica.reserved.items() if id not in reported}
        replica.work = PrefillLoad.of(report.detail) if report.role is Role.PREFILL else _NO_TIME
        replica.coming_ns = sum(held.ns for held in replica.coming.values())
        left_ns = replica.work.total_ns + replica.coming_ns
        replica.free_s = now_s + left_ns / 1e9 if left_ns else min(replica.free_s, now_s)

    def eligible(self, excluded: Collection[str], now_s: float) -> list[Replica]:
        """Replicas that take new work and are not excluded, by id.

        Those heard of lately; when none was, the feed is frozen: all that are known. Those held back only when there
        are no others.
        """
        if is_frozen := self.is_frozen(now_s):
            self._lapse(now_s)
        some = [
            replica
            for replica in self._replicas.values()
            if replica.report.is_accepting
            and (is_frozen or self._silence_s(replica, now_s) < EXPIRY_S)
            and replica.id not in excluded
        ]
        return [replica for replica in some if not replica.is_held_back(now_s)] or some

    def is_frozen(self, now_s: float) -> bool:
        """Nobody was heard of lately."""
        return now_s - self._heard_s >= EXPIRY_S

    def _silence_s(self, replica: Replica, now_s: float) -> float:
        """For how long it was not heard of while others were: when a feed goes on, not all are heard at once."""
        return now_s - max(replica.seen_s, self._thawed_s)

    def reserve(self, reservation: int, replica: Replica, route: Route, now_s: float) -> None:
        """Note that work is on its way to a replica."""
        ns = replica.cost_ns(route)
        replica.free_s = now_s + replica.left_s(now_s) + ns / 1e9
        replica.coming_ns += ns
        replica.hold(reservation, Reservation(route, now_s, ns, replica.free_s))
        self._holder[reservation] = replica.id

    def release(self, reservation: int, now_s: float) -> bool:
        """The work is over. False if it was not reserved here, or released before."""
        holder = self._holder.pop(reservation, None)
        if holder is None:
            return False
        replica = self._replicas[holder]
        held = replica.drop(reservation)
        if replica.coming.pop(reservation, None) is not None:
            replica.coming_ns -= held.ns
        replica.reported.discard(reservation)
        # What was done is worked off by time already; what ends sooner than it can be done was not done.
        replica.free_s -= max(0.0, held.ns / 1e9 - (now_s - held.made_s))
        if not replica.num_requests:
            replica.free_s, replica.coming_ns = min(replica.free_s, now_s), 0.0
        return True

    def refused(self, id: str, now_s: float) -> None:
        """A replica did not take what was routed to it: others first, until its next report."""
        replica = self._replicas.get(id)
        if replica is not None:
            replica.refused_s = now_s

    def lost(self, id: str) -> None:
        """A replica is gone, and all that was reserved there. Idempotent."""
        replica = self._replicas.pop(id, None)
        if replica is not None:
            for reservation in replica.reserved:
                del self._holder[reservation]

    def _lapse(self, now_s: float) -> None:
        for replica in self._replicas.values():
            for id in [id for id, held in replica.reserved.items() if held.is_lapsed(now_s)]:
                self.release(id, now_s)

    @property
    def num_reserved(self) -> int:
        """Reservations made here and not yet over."""
        return len(self._holder)

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)
