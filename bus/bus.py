"""The road: typed tell and ask over a wire that moves bytes between subjects.

A `Wire` is the broker's side (NATS in `broker.py`, memory in `memory.py`); `Bus` is ours, and the same over both.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import msgspec
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bus.subjects import Address
from schemas.failure import Code, Failure
from schemas.message import Message

M = TypeVar("M", bound=Message)
R = TypeVar("R")

OnFate = Callable[[bool], None]
"""What became of a message: True, its receiver answered; False, nobody listens there."""

DEADLINE_HEADER = "Shoal-Deadline-Ns"

MAX_SUBJECTS_BYTES = 4000
"""A subject and its reply. The broker takes 4096 bytes, with the verb and the sizes."""

_encode = msgspec.msgpack.Encoder().encode
_SPACE = re.compile(r"[ \t\r\n]")
_NEWLINE = re.compile(r"[\r\n]")
_HEADER_KEY = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")

_propagator = TraceContextTextMapPropagator()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


class Delivery(NamedTuple):
    """One message as it came off the wire.

    `is_missing` marks the broker's own answer that nobody listens on the subject we published to.
    """

    subject: str
    body: bytes
    reply: str
    headers: Mapping[str, str] | None
    is_missing: bool = False


class Wire(Protocol):
    """What a broker must do. One suite (tests/bus) holds both implementations to it.

    Subjects are dot-separated; `*` matches one token, a final `>` one or more. Subscriptions with the same queue share
    deliveries. A publish with a reply to a subject without listeners is answered on the reply with `is_missing`.
    Deliveries from one publisher arrive in order. `on_delivery` must only enqueue: it is called on the loop, one at a
    time; what it raises is logged, and the next delivery comes all the same.
    """

    @property
    def inbox(self) -> str:
        """A prefix only this connection may listen under, without trailing dot."""
        ...

    @property
    def max_payload(self) -> int:
        """The largest body plus headers the broker takes, in bytes."""
        ...

    @property
    def away_s(self) -> float:
        """Seconds for which the broker was out of reach so far, and others may have been. Silence proved nothing then:
        what is measured for it does not count them."""
        ...

    async def publish(
        self, subject: str, body: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Hand bytes to the broker; at most once.

        Raises `BusError`, before anything is sent: `too_large`, or `bad_request` for what is no subject or header.
        """
        ...

    async def subscribe(
        self, subject: str, on_delivery: Callable[[Delivery], None], *, queue: str = ""
    ) -> Callable[[], Any]:
        """Start listening. The result, an async callable, stops it: what was sent before arrives until it returns."""
        ...

    async def flush(self) -> None:
        """Return once the broker has seen all that was published or subscribed before."""
        ...

    async def close(self) -> None:
        """Let go of the connection. Idempotent."""
        ...


class BusError(Exception):
    """A tell or ask that failed, with the typed failure: the receiver's own, or one of the road's.

    The road's: `too_large`, `no_responders`, `deadline_exceeded`.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.failure = failure

    @property
    def code(self) -> Code:
        return self.failure.code


def fail(code: Code, message: str, *, field: str = "") -> BusError:
    """A BusError to raise."""
    return BusError(Failure(code=code, message=message, field=field))


def header_bytes(headers: Mapping[str, str]) -> int:
    """What headers add to a message on the wire: a version line, `key: value` lines, an empty line."""
    return 12 + sum(len(key) + len(value.encode()) + 4 for key, value in headers.items())


def check_subject(subject: str) -> None:
    """Raise `BusError(bad_request)` if this would not be one word on the wire."""
    if not subject or _SPACE.search(subject):
        raise fail(Code.BAD_REQUEST, f"{subject[:80]!r} is not a subject")


def check_subjects(subject: str, reply: str) -> None:
    """Raise `BusError(bad_request)` if these would not be one word each, and on one line together.

    A broker closes a connection for good that sends it a longer line.
    """
    check_subject(subject)
    if reply:
        check_subject(reply)
    if len(subject.encode()) + len(reply.encode()) > MAX_SUBJECTS_BYTES:
        raise fail(Code.BAD_REQUEST, f"the subject {subject[:80]!r} with its reply is over {MAX_SUBJECTS_BYTES} bytes")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise `BusError(bad_request)` if these would not each be one line on the wire."""
    for key, value in headers.items():
        if not _HEADER_KEY.fullmatch(key) or _NEWLINE.search(value):
            raise fail(Code.BAD_REQUEST, f"{key!r}: {value!r} is not a header")


def check_size(subject: str, body: bytes, headers: Mapping[str, str] | None, limit: int) -> None:
    """Raise `BusError(too_large)` if body and headers together exceed `limit` bytes."""
    size = len(body) + (header_bytes(headers) if headers else 0)
    if size > limit:
        raise fail(Code.TOO_LARGE, f"a message for {subject} has {size} bytes with headers; the limit is {limit}")


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The one decoder of a message type or union."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]


@dataclass(frozen=True)
class Seams:
    """What of the outside world actors may see, so that a simulation can replace it: clock, chance, place, threads.

    `run_beside` calls a long function beside the loop; its result or exception is the awaitable's. `die` ends the
    process, now.
    """

    clock_ns: Callable[[], int] = time.time_ns
    random: random.Random = field(default_factory=random.SystemRandom)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    run_beside: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread
    die: Callable[[], None] = lambda: os._exit(1)


class Bus:
    """Typed messages over a wire. One per process; actors share it.

    Call `open()` once, `close()` at the end. Asks carry headers (trace context and deadline); tells carry none.
    """

    def __init__(self, wire: Wire, seams: Seams | None = None) -> None:
        self.wire = wire
        self.seams = seams or Seams()
        self._waiting: dict[str, Callable[[Delivery], None]] = {}
        self._tokens = itertools.count(1)
        self._unsubscribe: Callable[[], Any] | None = None
        self._watched: dict[tuple[str, OnFate], str] = {}

    async def open(self) -> None:
        """Start listening on the inbox."""
        self._unsubscribe = await self.wire.subscribe(f"{self.wire.inbox}.*", self._on_inbox)

    async def close(self) -> None:
        """Stop listening and let go of the wire. Idempotent."""
        if self._unsubscribe is not None:
            stop, self._unsubscribe = self._unsubscribe, None
            await stop()
        await self.wire.close()

    async def tell(self, address: Address[M, Any], message: M, *, on_fate: OnFate | None = None) -> None:
        """Send and forget: at most once. Raises `BusError(too_large)`.

        `on_fate` is called later with True each time the receiver answers (a receipt), with False once if nobody
        listens there. Pass the same callable for all messages to one address; `forget` it when the conversation ends.
        """
        body = self._pack(address, message, 0)
        reply = "" if on_fate is None else self._watch(address.name, on_fate)
        await self.wire.publish(address.name, body, reply=reply)

    async def ask(self, address: Address[M, R], message: M, *, timeout_s: float) -> R:
        """Send, and wait for the answer.

        Raises `BusError`: the receiver's own failure, `no_responders` at once when nobody listens,
        `deadline_exceeded` after `timeout_s`, `too_large` before anything is sent.
        """
        headers = {DEADLINE_HEADER: str(self.seams.clock_ns() + int(timeout_s * 1e9))}
        _propagator.inject(headers)
        body = self._pack(address, message, header_bytes(headers))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Delivery | None] = loop.create_future()
        token = str(next(self._tokens))

        def on_answer(delivery: Delivery | None) -> None:
            if not answer.done():
                answer.set_result(delivery)

        self._waiting[token] = on_answer
        # A timer on the answer, not a timeout() around both awaits: nats-py may swallow a cancellation in publish().
        timer = loop.call_later(timeout_s, on_answer, None)
        try:
            await self.wire.publish(address.name, body, reply=f"{self.wire.inbox}.{token}", headers=headers)
            delivery = await answer
        finally:
            timer.cancel()
            del self._waiting[token]
        if delivery is None:
            raise fail(Code.DEADLINE_EXCEEDED, f"no answer from {address.name} within {timeout_s:g} s")
        if delivery.is_missing:
            raise fail(Code.NO_RESPONDERS, f"nobody listens on {address.name}")
        try:
            reply = decoder(address.subject.reply | Failure).decode(delivery.body)
        except msgspec.MsgspecError as error:
            raise fail(Code.INTERNAL, f"undecodable answer from {address.name}: {error}") from None
        if isinstance(reply, Failure):
            raise BusError(reply)
        return cast(R, reply)

    async def answer(self, reply_to: str, message: Message) -> None:
        """Answer an ask. An answer over the size contract is replaced by a `too_large` failure."""
        body = _encode(message)
        if len(body) > self.wire.max_payload:
            body = _encode(Failure(code=Code.TOO_LARGE, message=f"the answer has {len(body)} bytes"))
        await self.wire.publish(reply_to, body)

    async def publish(self, subject: str, body: bytes, *, on_fate: OnFate | None = None) -> None:
        """Raw bytes to a public subject (an inbox of a client). `on_fate` as for `tell`."""
        await self.wire.publish(subject, body, reply="" if on_fate is None else self._watch(subject, on_fate))

    def _pack(self, address: Address[M, Any], message: M, num_header_bytes: int) -> bytes:
        body = _encode(message)
        limit = address.subject.max_bytes
        if len(body) + num_header_bytes > limit:
            raise fail(
                Code.TOO_LARGE,
                f"{type(message).__name__} for {address.name} has {len(body) + num_header_bytes} bytes with headers; "
                f"the limit is {limit}: send it by handle",
            )
        return body

    def _watch(self, subject: str, on_fate: OnFate) -> str:
        """A reply subject for all messages of one sender to one subject: its answers become calls of `on_fate`."""
        key = (subject, on_fate)
        token = self._watched.get(key)
        if token is None:
            token = self._watched[key] = str(next(self._tokens))

            def on_answer(delivery: Delivery) -> None:
                if delivery.is_missing:
                    self.forget(subject, on_fate)
                on_fate(not delivery.is_missing)

            self._waiting[token] = on_answer
        return f"{self.wire.inbox}.{token}"

    def forget(self, subject: str, on_fate: OnFate) -> None:
        """Stop watching a subject given to tell or publish with this `on_fate`. Idempotent."""
        token = self._watched.pop((subject, on_fate), None)
        if token is not None:
            self._waiting.pop(token, None)

    def _on_inbox(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(delivery.subject.rpartition(".")[2])
        if waiting is not None:
            waiting(delivery)
