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
    the image is nothing new. That is a hint: a wrong one costs an encoding, and who has none balances as well.
    """

    def __init__(self) -> None:
        self._given: dict[tuple[str, str], str] = {}

    def __call__(self, replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
        for id in route.excluded:
            self._given.pop((route.digest, id), None)  # it did not take it

        def patches(replica: Replica) -> float:
            is_known = self._given.get((route.digest, replica.id)) == replica.report.incarnation
            return _outstanding(replica) + (0 if is_known else route.num_new)

        chosen = min(replicas, key=lambda replica: (patches(replica), replica.id))
        self._given.pop((route.digest, chosen.id), None)
        self._given[route.digest, chosen.id] = chosen.report.incarnation
        if len(self._given) > MAX_REMEMBERED:
            del self._given[next(iter(self._given))]
        return chosen


def _outstanding(replica: Replica) -> float:
    """Patches there, as it reports, and on their way. An image that several requests have is encoded once."""
    coming = {held.route.digest: held.route.num_new for held in replica.on_the_way()}
    return VisionLoad.of(replica.report.detail).num_patches + sum(coming.values())
