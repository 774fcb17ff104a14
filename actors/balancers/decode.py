"""Decode: which replica goes on with a computed prompt."""

from __future__ import annotations

from collections.abc import Sequence

from actors.balancers.choice import Full
from actors.balancers.ledger import Replica
from schemas.routing import Route


def emptiest_slots(replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
    """The smallest worst of slot share and token share. A full replica is no choice."""

    def share(replica: Replica) -> float:
        slots = replica.num_requests / max(replica.report.capacity_requests, 1)
        on_the_way = sum(held.route.num_new + held.route.num_cached for held in replica.on_the_way())
        return max(slots, (replica.report.num_tokens + on_the_way) / max(replica.report.capacity_tokens, 1))

    open_ones = [replica for replica in replicas if not replica.is_full]
    if not open_ones:
        raise Full(f"all {len(replicas)} decode replicas are full")
    return min(open_ones, key=lambda r: (share(r), r.num_requests, r.id))
