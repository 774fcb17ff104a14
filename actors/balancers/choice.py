"""Which replica: the policies a balancer can be given. By request count; cache affinity is ignored on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.balancers.ledger import Replica

Choice = Callable[[Sequence[Replica]], Replica | None]
"""Pick one of the eligible replicas, or None when all are full."""


def shortest_queue(replicas: Sequence[Replica]) -> Replica | None:
    """Prefill: fewest requests, then fewest tokens. A full replica is no choice."""
    open_ones = [replica for replica in replicas if replica.num_requests < replica.capacity_requests]
    return min(open_ones, key=lambda r: (r.num_requests, r.num_tokens_expected, r.id), default=None)


def emptiest_slots(replicas: Sequence[Replica]) -> Replica | None:
    """Decode: the smallest worst of slot share and token share. A full replica is no choice."""

    def share(replica: Replica) -> float:
        slots = replica.num_requests / max(replica.capacity_requests, 1)
        return max(slots, replica.num_tokens_expected / max(replica.capacity_tokens, 1))

    open_ones = [replica for replica in replicas if replica.num_requests < replica.capacity_requests]
    return min(open_ones, key=lambda r: (share(r), r.num_requests, r.id), default=None)
