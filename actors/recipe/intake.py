"""What a recipe takes on: so many requests, so many calls and bytes on their way into tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from actors.recipe.fields import Refusal
from schemas.failure import Code

MAX_OPEN = 4096
"""Requests from their arrival to their last event."""

MAX_CALLS = 1024
"""Calls at work: answers without generation, and requests whose prompt is not submitted yet."""

MAX_BYTES = 128 * 1024 * 1024
"""Their bodies together: sixteen of the largest."""


class Intake:
    """Counts calls at work and their bytes."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_bytes = 0

    def take(self, num_open: int, body_bytes: int) -> None:
        """Count a call in, or raise Refusal(overloaded): it is one too many."""
        if num_open >= MAX_OPEN:
            raise Refusal(Code.OVERLOADED, f"{num_open} requests are open here, and that is the limit: retry later")
        if self.num_calls >= MAX_CALLS or self.num_bytes + body_bytes > MAX_BYTES:
            held = f"{self.num_calls} calls with {self.num_bytes} bytes"
            raise Refusal(Code.OVERLOADED, f"{held} are being read here, and that is the limit: retry later")
        self.num_calls += 1
        self.num_bytes += body_bytes

    @contextmanager
    def working(self, body_bytes: int) -> Iterator[None]:
        """While a call that was let in is at work."""
        try:
            yield
        finally:
            self.num_calls -= 1
            self.num_bytes -= body_bytes
