"""What a balancer knows of its replicas: their own reports, and the reservations it made since.

The replica's ledger is the truth. A reservation counts from the moment it is made, so a burst between two reports is
spread; it is dropped when released, when its replica is gone, or when a report that should know it does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from actors.rules.owner import EXPIRY_S
from schemas.routing import LoadReported, Route

SETTLE_S = 10.0
"""A reservation this old that its replica's report does not list is over (its release was lost)."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Work on its way to a replica, or there, since `made_s`."""

    route: Route
    made_s: float


@dataclass(slots=True)
class Replica:
    """One data-parallel rank as the balancer sees it: its last report, heard at `seen_s`, and what was reserved since.

    `since_s`: when this incarnation was first heard of. `reported`: what its report lists and is not released yet.
    """

    report: LoadReported
    seen_s: float
    since_s: float
    reported: set[int]
    reserved: dict[int, Reservation] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.report.id

    @property
    def num_requests(self) -> int:
        """Requests there or on their way, each counted once."""
        return len(self.reported) + sum(reservation not in self.reported for reservation in self.reserved)

    @property
    def is_full(self) -> bool:
        """It holds as many requests as it ever can."""
        return self.num_requests >= self.report.capacity_requests

    def on_the_way(self) -> Iterator[Reservation]:
        """Own reservations that its report does not know yet."""
        return (held for id, held in self.reserved.items() if id not in self.reported)


class Ledger:
    """Replicas and reservations of one pool. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._holder: dict[int, str] = {}

    def report(self, report: LoadReported, now_s: float) -> None:
        """Take a replica's own word. Late reports of the same incarnation are ignored.

        Replicas not heard of for EXPIRY_S are taken for lost.
        """
        for silent in [r.id for r in self._replicas.values() if now_s - r.seen_s >= EXPIRY_S]:
            self.lost(silent)
        known = self._replicas.get(report.id)
        if known is not None and known.report.incarnation == report.incarnation:
            if report.seq <= known.report.seq:
                return
        else:
            self.lost(report.id)
            known = None
        reported = set(report.reservations)
        kept = {} if known is None else known.reserved
        for id in [id for id, held in kept.items() if id not in reported and now_s - held.made_s > SETTLE_S]:
            del kept[id], self._holder[id]
        since_s = now_s if known is None else known.since_s
        self._replicas[report.id] = Replica(report, now_s, since_s, reported, kept)

    def eligible(self, excluded: Collection[str], now_s: float) -> list[Replica]:
        """Replicas heard of lately that take new work and are not excluded, by id."""
        return [
            replica
            for id, replica in sorted(self._replicas.items())
            if replica.report.is_accepting and now_s - replica.seen_s < EXPIRY_S and id not in excluded
        ]

    def reserve(self, reservation: int, replica: Replica, route: Route, now_s: float) -> None:
        """Note that work is on its way to a replica."""
        replica.reserved[reservation] = Reservation(route, now_s)
        self._holder[reservation] = replica.id

    def release(self, reservation: int) -> bool:
        """The work is over. False if it was not reserved here, or released before."""
        holder = self._holder.pop(reservation, None)
        if holder is None:
            return False
        replica = self._replicas[holder]
        del replica.reserved[reservation]
        replica.reported.discard(reservation)
        return True

    def lost(self, id: str) -> None:
        """A replica is gone, and all that was reserved there. Idempotent."""
        replica = self._replicas.pop(id, None)
        if replica is not None:
            for reservation in replica.reserved:
                del self._holder[reservation]

    @property
    def num_reserved(self) -> int:
        """Reservations made here and not yet over."""
        return len(self._holder)

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)
