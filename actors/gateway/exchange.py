"""One request being served: how far its stream is, and how long it has been silent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar
from typing import Protocol as Interface

from actors.gateway.http import Request
from schemas.api import Protocol

KEEP_ALIVE_S = 10.0
"""A stream that was silent for so long carries a sign of life."""

MAX_STRIKES = 2
"""A recipe's answer may overtake its last items once; twice in a row, and what is missing is gone."""


class Stream(Interface):
    """The receiving end of a stream (bus/stream.py)."""

    stream_id: int
    next_seq: int


S = TypeVar("S", bound=Stream)


@dataclass(slots=True, eq=False)
class Exchange(Generic[S]):
    """A request, its stream, and the recipe that fills it (empty until one has answered). Times are in seconds."""

    request: Request
    protocol: Protocol
    stream: S
    quiet_since_s: float
    recipe: str = ""
    num_seen: int = 0
    num_strikes: int = 0
    is_asked_after: bool = False
    is_over: bool = False

    def is_silent(self, now_s: float) -> bool:
        """Has nothing come since the last look, and is there someone to ask why? Progress takes strikes back."""
        if self.num_seen != self.stream.next_seq:
            self.num_seen, self.quiet_since_s, self.num_strikes = self.stream.next_seq, now_s, 0
            return False
        return bool(self.recipe)

    def needs_keep_alive(self, now_s: float) -> bool:
        """Has it been silent for KEEP_ALIVE_S? Asking starts the time anew."""
        if now_s - self.quiet_since_s < KEEP_ALIVE_S:
            return False
        self.quiet_since_s = now_s
        return True

    def is_lost(self, next_seq: int) -> bool:
        """The recipe says how far the stream is, and sends what is missing (-1: it cannot). Is it lost?"""
        self.num_strikes = self.num_strikes + 1 if next_seq < 0 else 0
        return self.num_strikes >= MAX_STRIKES


def by_recipe(exchanges: Iterable[Exchange[S]]) -> dict[str, list[Exchange[S]]]:
    """Exchanges by the recipe that fills them."""
    found: dict[str, list[Exchange[S]]] = {}
    for exchange in exchanges:
        found.setdefault(exchange.recipe, []).append(exchange)
    return found
