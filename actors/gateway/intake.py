"""How many bytes of request bodies the gateway holds at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

MAX_BYTES = 64 * 1024 * 1024
"""All bodies together, from their first byte until a recipe has answered the call: eight of the largest."""

FREE_BYTES = 64 * 1024
"""The beginning of each body, which does not count: as much waits unread on any connection, and requests of the usual
size are served while large ones fill the rest."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class IntakeFull(Exception):
    """The body that would be one too many."""


class Intake:
    """Counts what the bodies hold."""

    def __init__(self) -> None:
        self.num_bytes = 0


class Upload:
    """One request body, counted as it comes and until `free`."""

    def __init__(self, intake: Intake) -> None:
        self.body = b""
        self._intake = intake
        self._num_seen = 0
        self._num_bytes = 0

    def counting(self, receive: Receive, limit_bytes: int) -> Receive:
        """`receive`, but raising IntakeFull when there is no room. What is over the limit of a body is not kept."""

        async def receive_counted() -> MutableMapping[str, Any]:
            message = await receive()
            self._num_seen += len(message.get("body", b""))
            size_bytes = max(0, min(self._num_seen, limit_bytes) - FREE_BYTES - self._num_bytes)
            if self._intake.num_bytes + size_bytes > MAX_BYTES:
                held = f"{self._intake.num_bytes} bytes of request bodies are being read here"
                raise IntakeFull(f"{held}, and that is the limit: retry later")
            self._num_bytes += size_bytes
            self._intake.num_bytes += size_bytes
            return message

        return receive_counted

    def free(self) -> None:
        """Hold it no longer. Idempotent."""
        self._intake.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self.body = b""
