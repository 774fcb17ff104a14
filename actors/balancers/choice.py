"""What every policy of a balancer is: a choice among replicas, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.balancers.ledger import Replica
from schemas.failure import Code
from schemas.routing import Route


class Full(Exception):
    """No replica should be given this work now. `retry_after_s`: when one may be; 0 when nobody can tell."""

    code = Code.OVERLOADED
    field = ""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class TooLate(Full):
    """Nor later: the work alone, without any wait, would end after its deadline."""

    code = Code.DEADLINE_EXCEEDED
    field = "deadline"


class Choice(Protocol):
    """A policy. What it knows of replicas is in its arguments; of its own it may remember who waits, which is forgotten
    without harm. Times are seconds of the caller's clock, but for `now_ns`, the unix time that deadlines are of."""

    def __call__(self, replicas: Sequence[Replica], route: Route, now_s: float, now_ns: int) -> Replica:
        """One of the eligible replicas, of which there is at least one. Raises Full."""
        ...
