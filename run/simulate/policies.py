"""What the quota is compared with: how others route prompts, as choices of our own balancer. All see what it sees."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from actors.balancers.choice import Choice, Full
from actors.balancers.ledger import Replica
from schemas.routing import Route

VIEW_BLOCKS = 1 << 20
"""Blocks of each replica that the affinity policy remembers: 128 M tokens."""


def choice_of(policy: str, blocks: Mapping[str, Sequence[int]], overlap_weight: float) -> Choice | None:
    """The policy of that name; None for the balancer's own. `blocks`: the ids of each request's prompt."""
    match policy:
        case "quota":
            return None
        case "requests":
            return fewest_requests
        case "round-robin":
            return InTurn()
        case "tokens":
            return fewest_tokens
        case "affinity":
            return Affinity(blocks, overlap_weight)
        case _:
            raise ValueError(f"no policy is called {policy!r}")


def fewest_requests(replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
    """Requests there and on their way."""
    return min(_open(replicas), key=lambda r: (r.num_requests, r.id))


def fewest_tokens(replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
    """Tokens still to compute, there and on their way."""
    return min(_open(replicas), key=lambda r: (_tokens_left(r), r.id))


class InTurn:
    """Each replica in its turn."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
        self._turn += 1
        return replicas[self._turn % len(replicas)]


class Affinity:
    """Where most of its prompt was computed before, against the load: the least of `overlap_weight` times the blocks
    that a replica has not seen, plus the blocks it has still to compute. It remembers what it sent where.

    The store it runs on here is shared, so that a prefix is cached wherever it goes: what is compared is the balance.
    """

    def __init__(self, blocks: Mapping[str, Sequence[int]], overlap_weight: float) -> None:
        self._blocks = blocks
        self._overlap_weight = overlap_weight
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def __call__(self, replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
        blocks = self._blocks[route.request_id]

        def score(replica: Replica) -> tuple[float, str]:
            seen = self._seen.get(replica.id, OrderedDict())
            num_seen = next((number for number, block in enumerate(blocks) if block not in seen), len(blocks))
            return self._overlap_weight * (len(blocks) - num_seen) + _tokens_left(replica) / 128, replica.id

        chosen = min(_open(replicas), key=score)
        seen = self._seen.setdefault(chosen.id, OrderedDict())
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > VIEW_BLOCKS:
            seen.popitem(last=False)
        return chosen


def _tokens_left(replica: Replica) -> int:
    return replica.report.num_tokens + sum(held.route.num_new for held in replica.on_the_way())


def _open(replicas: Sequence[Replica]) -> list[Replica]:
    found = [replica for replica in replicas if not replica.is_full]
    if not found:
        raise Full(f"all {len(replicas)} prefill replicas are full")
    return found
