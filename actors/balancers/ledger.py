"""What a balancer knows of its replicas: their own reports, and the reservations it made since.

The replica's ledger is the truth. A reservation counts from the moment it is made, so a burst between two reports is
spread; it is dropped when released, when its replica is gone, or when a report that should know it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.rules.owner import EXPIRY_S
from schemas.routing import LoadReported

SETTLE_S = 10.0
"""A reservation this old that its replica's report does not list is over (its release was lost)."""


@dataclass(slots=True)
class Replica:
    """One data-parallel rank as the balancer sees it."""

    id: str
    incarnation: str
    seq: int
    seen_s: float
    is_accepting: bool
    capacity_requests: int
    capacity_tokens: int
    num_tokens: int
    reported: set[int]
    reserved: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Own reservations: id → (made at, tokens)."""

    @property
    def num_requests(self) -> int:
        """Requests there or on their way, each counted once."""
        return len(self.reported) + sum(reservation not in self.reported for reservation in self.reserved)

    @property
    def num_tokens_expected(self) -> int:
        """Tokens held there, and those of reservations its report does not know yet."""
        on_the_way = (tokens for id, (_, tokens) in self.reserved.items() if id not in self.reported)
        return self.num_tokens + sum(on_the_way)


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
        replica = self._replicas.get(report.id)
        if replica is not None and replica.incarnation == report.incarnation:
            if report.seq <= replica.seq:
                return
        else:
            self.lost(report.id)
            replica = None
        reported = set(report.reservations)
        kept = {} if replica is None else replica.reserved
        for id in [id for id, (made_s, _) in kept.items() if id not in reported and now_s - made_s > SETTLE_S]:
            del kept[id], self._holder[id]
        self._replicas[report.id] = Replica(
            id=report.id,
            incarnation=report.incarnation,
            seq=report.seq,
            seen_s=now_s,
            is_accepting=report.is_accepting,
            capacity_requests=report.capacity_requests,
            capacity_tokens=report.capacity_tokens,
            num_tokens=report.num_tokens,
            reported=reported,
            reserved=kept,
        )

    def eligible(self, excluded: list[str], now_s: float) -> list[Replica]:
        """Replicas heard of lately that take new work and are not excluded, by id."""
        return [
            replica
            for id, replica in sorted(self._replicas.items())
            if replica.is_accepting and now_s - replica.seen_s < EXPIRY_S and id not in excluded
        ]

    def reserve(self, reservation: int, replica: Replica, num_tokens: int, now_s: float) -> None:
        """Note that work is on its way to a replica."""
        replica.reserved[reservation] = (now_s, num_tokens)
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
