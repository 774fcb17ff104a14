"""Choosing a replica: route, reservation, release, and the load reports that decide it."""

from __future__ import annotations

from schemas.message import Message, Role


class Route(Message, frozen=True):
    """Ask a balancer for a replica. Costs are counted in tokens: `num_new` to compute, `num_cached` already there."""

    request_id: str
    num_new: int
    num_cached: int = 0
    excluded: list[str] = []


class Routed(Message, frozen=True):
    """The chosen replica, and the reservation that must be released exactly once, at `balancer`."""

    replica: str
    reservation: int
    balancer: str


class Release(Message, frozen=True):
    """The work behind a reservation is over (done, cancelled, refused or failed). Idempotent."""

    reservation: int


class ReportLoad(Message, frozen=True):
    """Everyone who hears this publishes a `LoadReported` at once (a balancer or `shoal status` has just started)."""


class LoadReported(Message, frozen=True):
    """Who is here, and how loaded. Published at the start, on drain, when asked, and as a heartbeat.

    `incarnation` is new at each start of the actor; `seq` grows by one per report, so late reports are recognised.
    `reservations` are the reservations this replica holds: its ledger is the truth balancers reconcile with.
    """

    role: Role
    id: str
    incarnation: str
    seq: int
    pid: int
    host: str
    is_accepting: bool = True
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    capacity_requests: int = 0
    capacity_tokens: int = 0
    reservations: list[int] = []
    detail: dict[str, float] = {}
