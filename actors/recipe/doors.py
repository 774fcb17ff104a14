"""Where a client's items go: a stream at a gateway, or the inbox of a NATS client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import Protocol as Interface

from actors.rules.errors import error_body
from schemas.api import Protocol
from schemas.failure import Code, Failure

SENTINEL = b""
"""The empty payload that ends every reply to a NATS client (ADR-47)."""


SEQ_BYTES = 32
"""What the number adds to an event, at most."""


class Stream(Interface):
    """The sending end of a stream to a gateway (bus/writer.py)."""

    stream_id: int

    def put(
        self, item: bytes, *, is_last: bool = False, status: int = 200, retry_after_s: float = 0.0
    ) -> None: ...

    def close(self) -> None: ...


class GatewayDoor:
    """A stream at a gateway."""

    def __init__(self, gateway: str, stream: Stream) -> None:
        self.gateway = gateway
        self.stream_id = stream.stream_id
        self._stream = stream

    def put(
        self, items: list[bytes], *, is_last: bool = False, status: int = 200, retry_after_s: float = 0.0
    ) -> None:
        """Add items, in order. With `is_last` there is at least one, and it ends the stream with this HTTP status, and
        the time after which to try again."""
        put = self._stream.put
        for item in items[:-1] if is_last else items:
            put(item)
        if is_last:
            put(items[-1], is_last=True, status=status, retry_after_s=retry_after_s)

    def close(self) -> None:
        """Nothing more will come."""
        self._stream.close()


class InboxDoor:
    """The inbox of a NATS client. Messages gather in `outbox` as (door, body).

    Each event of a stream is one message with `"seq": n` in front of its first field; a request that is not streamed
    gets one message. The sentinel follows in both cases. `on_fate` hears when nobody listens there any more.
    A message over `max_bytes` (the broker's limit) is replaced by an error.
    """

    def __init__(
        self, inbox: str, outbox: list[tuple[Any, bytes]], on_fate: Callable[[bool], None], max_bytes: int
    ) -> None:
        self.inbox = inbox
        self.on_fate = on_fate
        self.is_stream = False
        self._outbox = outbox
        self._max_bytes = max_bytes
        self._seq = 0

    def put(
        self, items: list[bytes], *, is_last: bool = False, status: int = 200, retry_after_s: float = 0.0
    ) -> None:
        """See `GatewayDoor.put`; status and time are not sent, the body of an error says it all."""
        for item in items:
            if len(item) > self._max_bytes - SEQ_BYTES:
                failure = Failure(code=Code.TOO_LARGE, message=f"this message has {len(item)} bytes")
                item = error_body(Protocol.CHAT_COMPLETIONS, failure, "")
            body = b'{"seq":%d,' % self._seq + item[1:] if self.is_stream else item
            self._outbox.append((self, body))
            self._seq += 1
        if is_last:
            self._outbox.append((self, SENTINEL))

    def reply(self, body: bytes) -> None:
        """One message, and no more."""
        self.put([body], is_last=True)

    def close(self) -> None:
        """Nothing more will come."""


Door = GatewayDoor | InboxDoor
