"""Prefill: which replica gets the next prompt."""

from __future__ import annotations

from collections.abc import Sequence

from actors.balancers.choice import Full
from actors.balancers.ledger import Replica
from schemas.routing import Route


def shortest_queue(replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
    """Fewest requests. A full replica is no choice."""
    open_ones = [replica for replica in replicas if not replica.is_full]
    if not open_ones:
        raise Full(f"all {len(replicas)} prefill replicas are full")
    return min(open_ones, key=lambda r: (r.num_requests, r.id))
