"""Choosing a replica: route, reservation, release, and the load reports that decide it."""

from __future__ import annotations

from schemas.message import Message, Role


class Route(Message, frozen=True):
    """Ask a balancer for a replica, by what is to be done there.

    Of prefill: `num_new` tokens to compute behind `num_cached` ones in `num_blocks` blocks to load, of which the last
    `num_replayed` are computed again; `is_exact`: by all layers. Of decode: at most `num_new` tokens behind a prompt of
    `num_cached`; `is_whole`: with room for all of them from the start. Of vision: `num_new` patches of the image
    `digest`.
    `deadline_ns` is unix time, 0 for none: what cannot be done by then is refused. `tenant`: whose request it is.
    """

    request_id: str
    num_new: int
    num_cached: int = 0
    excluded: list[str] = []
    num_replayed: int = 0
    num_blocks: int = 0
    deadline_ns: int = 0
    tenant: str = ""
    digest: str = ""
    is_exact: bool = False
    is_whole: bool = False


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
    `reservations` are the reservations this replica holds: its ledger is the truth balancers reconcile with. `detail`
    has the numbers of its role; those that balancers read are in `actors/rules/load.py`.
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
