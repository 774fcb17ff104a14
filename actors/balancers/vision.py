"""Vision: which replica encodes the next image."""

from __future__ import annotations

from collections.abc import Sequence

from actors.balancers.ledger import Replica
from actors.rules.load import VisionLoad
from schemas.routing import Route


def fewest_patches(replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
    """The least to encode, there and on its way."""

    def patches(replica: Replica) -> float:
        return VisionLoad.of(replica.report.detail).num_patches + sum(h.route.num_new for h in replica.on_the_way())

    return min(replicas, key=lambda r: (patches(r), r.id))
