"""Vision: which replica encodes the next image."""

from __future__ import annotations

from collections.abc import Sequence

from actors.balancers.ledger import Replica
from actors.rules.load import VisionLoad
from schemas.routing import Route

MAX_REMEMBERED = 4096
"""Images, with who was given them: half a megabyte. Replicas remember a dozen to thousands, by size."""


class FewestPatches:
    """The least to encode: there, on its way, and this image itself.

    A replica that was lately given the same image, and has not been restarted since, has it still or is at it: to it
    the image is nothing new. That is a hint: a wrong one costs an encoding, and a balancer that knows of none balances.
    """

    def __init__(self) -> None:
        self._given: dict[tuple[str, str, str], None] = {}

    def __call__(self, replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
        def patches(replica: Replica) -> float:
            is_known = self._key(replica, route) in self._given
            return _outstanding(replica) + (0 if is_known else route.num_new)

        chosen = min(replicas, key=lambda replica: (patches(replica), replica.id))
        key = self._key(chosen, route)
        self._given.pop(key, None)
        self._given[key] = None
        if len(self._given) > MAX_REMEMBERED:
            del self._given[next(iter(self._given))]
        return chosen

    def _key(self, replica: Replica, route: Route) -> tuple[str, str, str]:
        return route.digest, replica.id, replica.report.incarnation


def _outstanding(replica: Replica) -> float:
    """Patches there, as it reports, and on their way. An image that several requests have is encoded once."""
    coming = {held.route.digest: held.route.num_new for held in replica.on_the_way()}
    return VisionLoad.of(replica.report.detail).num_patches + sum(coming.values())
