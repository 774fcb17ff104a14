"""Prefill replicas as a balancer sees them, with its ledger and policy and without actors."""

from __future__ import annotations

from msgspec import structs

from actors.balancers.ledger import Ledger, Replica
from actors.balancers.prefill import ComputeQuota
from actors.rules.cost import Cost
from actors.rules.load import PrefillLoad
from schemas.routing import LoadReported, Route
from tests.actors.builders import report

SECOND = 1e9
BY_TOKEN = Cost(step_ns=0.0, token_ns=1e6, pair_ns=0.0, block_ns=0.0)
"""A thousand tokens take a second."""

OLD_S = 100.0
"""Replicas are not new any more."""


def load(
    id: str,
    seq: int = 1,
    *,
    left_s: float | dict[str, float] = 0.0,
    cost: Cost = BY_TOKEN,
    reservations: tuple[int, ...] = (),
    num_unfinished: int | None = None,
    incarnation: str = "a",
) -> LoadReported:
    by_tenant = left_s if isinstance(left_s, dict) else {"t": left_s}
    said = PrefillLoad({tenant: left * SECOND for tenant, left in by_tenant.items()}, cost)
    return structs.replace(
        report(id, seq=seq, incarnation=incarnation),
        reservations=list(reservations),
        num_waiting=len(reservations) if num_unfinished is None else num_unfinished,
        detail=said.detail(),
        capacity_requests=1000,
    )


def route(num_new: int = 1000, **fields: object) -> Route:
    return Route(request_id="r", num_new=num_new, tenant="t", **fields)  # type: ignore[arg-type]


class Pool:
    """A balancer's ledger and policy, and a clock. Its replicas are not new."""

    def __init__(self, *reports: LoadReported, id: str = "pb0") -> None:
        self.ledger, self.choice = Ledger(), ComputeQuota(id)
        self.now_s, self.num_routed = 0.0, 0
        for one in reports:
            self.ledger.report(structs.replace(one, seq=0), self.now_s)
        self.now_s = OLD_S
        for one in reports:
            self.ledger.report(one, self.now_s)

    def hear(self, *reports: LoadReported) -> None:
        for one in reports:
            self.ledger.report(one, self.now_s)

    def choose(self, wanted: Route) -> Replica:
        return self.choice(self.ledger.eligible(wanted.excluded, self.now_s), wanted, self.now_s, int(self.now_s * 1e9))

    def route(self, wanted: Route | None = None) -> str:
        chosen = self.choose(wanted or route())
        self.num_routed += 1
        self.ledger.reserve(self.num_routed, chosen, wanted or route(), self.now_s)
        return chosen.id

    def left_s(self, id: str) -> float:
        return self.ledger._replicas[id].left_s(self.now_s)
