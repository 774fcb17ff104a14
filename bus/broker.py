"""The wire over NATS, on nats-py."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from nats import errors
from nats.aio.client import Client, Server

from bus.bus import BusError, Delivery, check_headers, check_size, check_subjects, fail
from bus.micro import Directory
from bus.subjects import INTERNAL_INBOX
from schemas.failure import Code

log = logging.getLogger("shoal.bus")

HIGH_WATER_BYTES = 1024 * 1024
"""What may wait for the socket before publishers are held back."""

RECONNECT_BUFFER_BYTES = 16 * 1024 * 1024
"""What is kept while the broker is away; more is dropped and counted."""

FLUSH_TIMEOUT_S = 5.0
UNSUBSCRIBE_TIMEOUT_S = 0.5
CLOSE_TIMEOUT_S = 2.0
MAX_RECONNECT_WAIT_S = 2.0
SETTLE_S = 3.0
"""After a reconnect others may still be on their way back: for so long "nobody listens there" proves nothing, and
counts as a lost message."""


_NO_RESPONDERS = b"NATS/1.0 503"


class _Client(Client):
    """nats-py, delivering straight from its read loop.

    Its own path queues each message for a task per subscription, which a `CancelledError` raised by a callback ends
    for good, and lets a client's non-UTF-8 reply subject or header status end the read loop. Ours only enqueues in
    the actor's bounded mailbox, so neither the queue nor the task is needed, and bytes from outside cannot raise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listeners: dict[int, Callable[[Delivery], None]] = {}
        self.settled_s = 0.0  # inf while there is no connection

    def send(self, command: bytes) -> None:
        """Queue a command for the flusher, in order; what `publish` does behind four coroutines and two checks."""
        self._pending.append(command)
        self._pending_data_size += len(command)
        kicks = self._flush_queue
        if kicks is not None and kicks.empty() and self.is_connected:
            kicks.put_nowait(asyncio.get_running_loop().create_future())

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        listener = self.listeners.get(sid)
        if listener is None:
            return  # came before the broker saw our unsubscribe
        try:
            if not headers:
                delivery = Delivery(subject.decode(), data, reply.decode(), None)
            elif headers.startswith(_NO_RESPONDERS) and not data:
                if asyncio.get_running_loop().time() < self.settled_s:
                    return
                delivery = Delivery(subject.decode(), data, "", None, is_missing=True)
            else:
                delivery = Delivery(subject.decode(), data, reply.decode(), _parse_headers(headers))
            listener(delivery)
        except UnicodeDecodeError:
            log.warning("dropped a message whose subject is not UTF-8: %r, reply %r", subject, reply)
        except (Exception, asyncio.CancelledError):
            log.exception("a listener on %s raised; it must only enqueue", subject.decode())


def _parse_headers(raw: bytes) -> dict[str, str] | None:
    headers = {}
    for line in raw.split(b"\r\n")[1:]:
        key, colon, value = line.partition(b":")
        if colon:
            headers[key.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return headers or None


def _format_headers(headers: Mapping[str, str]) -> bytes:
    check_headers(headers)
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


class NatsWire:
    """One connection to a NATS server; see `bus.bus.Wire`. Made by `connect`.

    A lost connection comes back by itself: the wire never stops trying, and listens again on all it listened on.
    Meanwhile publishes wait in a bounded buffer; what does not fit is dropped and counted in `num_dropped`.
    """

    def __init__(self, client: _Client, inbox: str) -> None:
        self.inbox = inbox
        self.num_dropped = 0
        self.num_reconnects = 0
        self._client = client
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._tokens = itertools.count(1)
        self._lost = asyncio.Event()
        self._is_closing = False
        self._directory = Directory(self)
        self._away_s, self._left_s = 0.0, float("inf")  # all but the last time, and when that began

    @classmethod
    async def connect(
        cls, url: str, *, name: str, inbox_prefix: str = INTERNAL_INBOX, timeout_s: float = 10.0
    ) -> NatsWire:
        """Connect, as `nats://user:password@host:port`.

        `name` is shown in the broker's monitoring. `inbox_prefix` is what a client user may listen under. Raises
        `BusError(no_responders)` if there is no broker within `timeout_s`, or it refuses us.
        """
        client = _Client()
        wire = cls(client, f"{inbox_prefix}.{secrets.token_hex(11)}")
        connecting = asyncio.ensure_future(
            client.connect(
                url,
                name=name,
                error_cb=wire._on_error,
                disconnected_cb=wire._on_disconnected,
                reconnected_cb=wire._on_reconnected,
                closed_cb=wire._on_closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                reconnect_to_server_handler=_choose_server,
                ping_interval=10,
                # An unbounded queue never makes publish() wait inside nats-py, where a cancellation would be swallowed.
                flusher_queue_size=0,
                pending_size=RECONNECT_BUFFER_BYTES,
            )
        )
        done, _ = await asyncio.wait({connecting}, timeout=timeout_s)
        if not done:
            connecting.cancel()
            await asyncio.wait({connecting})
            await wire.close()
            raise fail(Code.NO_RESPONDERS, f"cannot connect to NATS at {_without_secrets(url)}: {client.last_error!r}")
        connecting.result()
        await wire.subscribe(f"{wire.inbox}.flush.*", wire._on_echo)
        await wire.flush()
        return wire

    @property
    def max_payload(self) -> int:
        """The largest body plus headers, in bytes, as the server said."""
        return int(self._client.max_payload)

    @property
    def away_s(self) -> float:
        """See `Wire.away_s`. Until SETTLE_S after we were back."""
        now_s = asyncio.get_running_loop().time()
        return self._away_s + max(0.0, min(now_s, self._client.settled_s) - self._left_s)

    async def publish(
        self, subject: str, body: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """See `Wire.publish`. Raises `BusError(shutting_down)` once closed."""
        client = self._client
        check_subjects(subject, reply)
        # Headers count too: a message over the limit makes the server close the connection for good.
        if headers is not None or len(body) > client.max_payload:
            check_size(subject, body, headers, self.max_payload)
        if headers is None:
            command = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(body), body)
        else:
            block = _format_headers(headers)
            sizes = len(block), len(block) + len(body)
            command = b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply.encode(), *sizes, block, body)
        if not client.is_connected:
            if client.is_closed:
                raise fail(Code.SHUTTING_DOWN, f"the connection is closed; nothing was sent to {subject}")
            if client.pending_data_size + len(command) > RECONNECT_BUFFER_BYTES:
                self.num_dropped += 1
                if self.num_dropped.bit_count() == 1:
                    log.error("the broker is away and the buffer full: %d messages dropped so far", self.num_dropped)
                return
        client.send(command)
        if client.pending_data_size > HIGH_WATER_BYTES and client.is_connected:
            try:
                await self.flush()
            except BusError as error:  # it is queued all the same: a tell does not fail because the broker is slow
                log.warning("%d bytes wait for the broker: %s", client.pending_data_size, error)

    async def subscribe(
        self, subject: str, on_delivery: Callable[[Delivery], None], *, queue: str = ""
    ) -> Callable[[], Any]:
        """See `Wire.subscribe`. Raises `BusError(shutting_down)` once closed."""
        client = self._client
        try:
            # A future instead of a callback: nats-py starts no task, and `_process_msg` never resolves it.
            subscription = await client.subscribe(subject, queue, future=asyncio.Future())
        except errors.BadSubjectError:
            raise fail(Code.BAD_REQUEST, f"{subject!r} is not a subject") from None
        except (errors.ConnectionClosedError, errors.ConnectionDrainingError):
            raise fail(Code.SHUTTING_DOWN, f"the connection is closed; cannot listen on {subject}") from None
        client.listeners[subscription._id] = on_delivery

        async def unsubscribe() -> None:
            if subscription._id not in client.listeners:
                return
            try:
                await subscription.unsubscribe()
                if client.is_connected:
                    await self.flush(timeout_s=UNSUBSCRIBE_TIMEOUT_S)
            except (BusError, errors.Error) as error:
                log.info("unsubscribing from %s: %s", subject, error)
            finally:
                client.listeners.pop(subscription._id, None)

        return unsubscribe

    async def flush(self, *, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """See `Wire.flush`. Raises `BusError(deadline_exceeded)` when the broker does not answer.

        A message to ourselves, because nats-py writes its PING ahead of commands that wait to be written.
        """
        if self._client.is_closed:
            raise fail(Code.SHUTTING_DOWN, "the connection is closed")
        token = str(next(self._tokens))
        echo: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._echoes[token] = echo
        try:
            self._client.send(b"PUB %b.flush.%b  0\r\n\r\n" % (self.inbox.encode(), token.encode()))
            async with asyncio.timeout(timeout_s):
                await echo
        except TimeoutError:
            raise fail(Code.DEADLINE_EXCEEDED, "the broker does not answer") from None
        finally:
            del self._echoes[token]

    async def announce(self, role: str, id: str, version: str) -> None:
        """List an actor under `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS` (NATS ADR-32) as service `shoal-<role>`."""
        await self._directory.announce(role, id, version)

    async def wait_lost(self) -> None:
        """Return when the connection has ended for good without `close()`: the process should end too."""
        await self._lost.wait()

    async def close(self) -> None:
        """See `Wire.close`. Takes two seconds at most."""
        self._is_closing = True
        self._client.listeners.clear()
        if self._client.is_closed:
            return
        closing = asyncio.ensure_future(self._client.close())
        # Not a timeout(): nats-py swallows cancellation while it closes.
        done, _ = await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        if not done:
            log.warning("the connection did not close within %g s", CLOSE_TIMEOUT_S)
        elif closing.cancelled():  # by nats-py itself, when the connection breaks meanwhile
            log.info("the connection ended while it was being closed")
        elif (error := closing.exception()) is not None:
            log.info("closing the connection: %r", error)

    def _on_echo(self, delivery: Delivery) -> None:
        echo = self._echoes.get(delivery.subject.rpartition(".")[2])
        if echo is not None and not echo.done():
            echo.set_result(None)

    async def _on_error(self, error: Exception) -> None:
        log.log(logging.WARNING if self._client.is_connected else logging.DEBUG, "NATS: %r", error)

    async def _on_disconnected(self) -> None:
        self._away_s, self._left_s = self.away_s, asyncio.get_running_loop().time()
        self._client.settled_s = float("inf")
        if not self._is_closing:
            log.warning("lost the connection to NATS; trying again until it is back")

    async def _on_reconnected(self) -> None:
        self.num_reconnects += 1
        self._client.settled_s = asyncio.get_running_loop().time() + SETTLE_S
        log.warning("connected to NATS again")

    async def _on_closed(self) -> None:
        if not self._is_closing:
            log.error("the connection to NATS has ended for good: %r", self._client.last_error)
            self._lost.set()


def _choose_server(servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
    """The server tried least often, after an exponential wait with jitter."""
    server = min(servers, key=lambda s: s.reconnects)
    wait_s = min(MAX_RECONNECT_WAIT_S, 0.05 * 2.0 ** min(server.reconnects, 10))
    return server, wait_s * random.uniform(0.5, 1.0)


def _without_secrets(url: str) -> str:
    return urlsplit(url if "//" in url else f"//{url}").netloc.rpartition("@")[2]
