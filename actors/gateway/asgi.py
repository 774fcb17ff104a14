"""The HTTP server that the gateway lives behind, and the few words of ASGI it speaks with it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from actors.gateway.http import Reply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ABSURD_FACTOR = 8
"""A body over the limit is still read up to so many times the limit: a client that is writing hears no answer."""


class BodyTooLarge(ValueError):
    """The request body is over the limit."""


REQUEST_S = 60.0
"""A request must have come whole so long after its connection or its first byte."""

SEND_S = 60.0
"""A client with 64 KiB waiting for it, over what the kernel holds, must take three quarters of them in so long."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, but it does not wait for ever, and a body that ends too early is answered.

    A request that stops arriving (the client has shut its side, or takes longer than REQUEST_S) gets to the
    application as far as it came, if its headers did, which then finds it malformed; else the connection is closed.
    A client that does not take its response for SEND_S is cut off.
    """

    _has_head = False
    _timer: Any = None
    _sending: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._stop_sending_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_sending_timer()
        super().resume_writing()

    def _stop_sending_timer(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait_for_request()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._has_head = True

    def on_message_complete(self) -> None:
        self._has_head = False
        self._timer.cancel()
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client writes no more. True keeps our side open, to answer."""
        is_cut_short = self._has_head
        if is_cut_short:
            self._end_body()
        return is_cut_short

    def _wait_for_request(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_S, self._on_too_slow)

    def _on_too_slow(self) -> None:
        if self._has_head:
            self._end_body()
        else:
            self.transport.close()

    def _end_body(self) -> None:
        self._has_head = False
        self.cycle.keep_alive = False
        self.cycle.more_body = False
        self.cycle.message_event.set()


class Server(uvicorn.Server):
    """Serves `app` on one listener. Leaves signals to the process it lives in; calls `on_listening` when ready."""

    def __init__(self, app: Callable[..., Awaitable[None]], on_listening: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._on_listening()


def listener(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one."""
    server = socket.create_server((host, port), backlog=2048)
    server.setblocking(False)
    return server


async def read_body(receive: Receive, limit_bytes: int) -> bytes | None:
    """The whole body; None if the client went away before its end. Raises BodyTooLarge."""
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes <= limit_bytes:
            parts.append(part)
        if not message.get("more_body") or size_bytes > ABSURD_FACTOR * limit_bytes:
            break
    if size_bytes > limit_bytes:
        raise BodyTooLarge(f"the body has more than {limit_bytes} bytes")
    return b"".join(parts)


async def client_gone(receive: Receive) -> None:
    """Return when the client has gone, or has its whole response."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole response."""
    headers = [*reply.headers, (b"content-length", b"%d" % len(reply.body))]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
