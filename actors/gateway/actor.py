"""The gateway: HTTP and SSE on one side, subjects on the other."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from msgspec import structs
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.gateway import asgi
from actors.gateway.asgi import Message, Receive, Send, send_reply
from actors.gateway.exchange import Exchange, by_recipe
from actors.gateway.http import (
    HEALTH_PATH,
    MODELS_PATH,
    POSTS,
    Reply,
    Request,
    block,
    frame,
    health,
    ignored_header,
    models_body,
    not_found,
)
from actors.gateway.intake import Intake, IntakeFull, Upload
from actors.gateway.keys import Keys
from actors.rules.errors import error_event
from actors.rules.tenants import new_id
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.stream import InStream, StreamReader
from bus.subjects import CALL, EXITED, MAX_PUBLIC_BYTES, PROBE, RECIPE_CANCEL, STREAM, Address, Subject
from schemas.api import PUBLIC, Answer, Call, Called, Probe, Protocol, StreamBatch
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel, CancelReason, Taken
from schemas.routing import LoadReported

log = logging.getLogger("shoal.gateway")
tracer = trace.get_tracer("shoal")
_propagator = TraceContextTextMapPropagator()

MAX_BODY_BYTES = MAX_PUBLIC_BYTES
CALL_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 5.0
STALL_S = 30.0
"""A stream whose recipe neither sends nor answers a probe for so long is given up."""

WATCH_S = 2.0
KEEP_ALIVE = b""
"""An item the gateway puts into a silent stream itself: real ones are never empty."""

_UNANSWERED = (Code.DEADLINE_EXCEEDED, Code.INTERNAL)
"""Codes of a call that a recipe may be serving all the same: its answer did not come, or cannot be read."""

_Exchange = Exchange[InStream]


class Gateway(Actor):
    """Serves HTTP on `port` (0: any free one; the actual one is `.port` once ready).

    Listens on `host` without keys, on all interfaces with them.
    """

    role = Role.GATEWAY

    def __init__(
        self, id: str, bus: Bus, bulk: Bulk, *, port: int = 8000, host: str = "127.0.0.1", keys: Keys | None = None
    ) -> None:
        super().__init__(id, bus)
        self.port = port
        self._host = host
        self._keys = keys or Keys()
        self._bulk = bulk
        self._reader = StreamReader(bulk, self._on_too_slow)
        self._intake = Intake()
        self._exchanges: dict[int, _Exchange] = {}
        self._stream_ids = itertools.count(1)
        self._server: asgi.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {STREAM: self._on_stream}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {EXITED.all(): self._on_exited}

    async def on_start(self) -> None:
        sock = asgi.listener("0.0.0.0" if self._keys else self._host, self.port)
        self.port = sock.getsockname()[1]
        is_listening = asyncio.Event()
        self._server = asgi.Server(self._serve_http, is_listening.set)
        self._serving = asyncio.create_task(self._server.serve([sock]), name=f"http/{self.id}")
        self._serving.add_done_callback(self._on_server_done)
        await is_listening.wait()
        self.spawn(self._watch())

    async def on_stop(self) -> None:
        for exchange in list(self._exchanges.values()):
            exchange.stream.fail(fail(Code.SHUTTING_DOWN, "the gateway is stopping"))
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=1.0)  # the cancels of what was just cut off

    def load(self) -> LoadReported:
        return structs.replace(super().load(), num_running=len(self._exchanges))

    def _on_server_done(self, task: asyncio.Task[None]) -> None:
        if not self._is_stopped:
            self._on_task_done(task)

    # HTTP

    async def _serve_http(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        tenant = self._keys.tenant(headers)
        request_id = new_id(tenant or PUBLIC, self.bus.seams.random.getrandbits(128))
        request = Request(scope["method"], scope["path"], headers, request_id, self.bus.seams.clock_ns())
        if request.path == HEALTH_PATH and request.method == "GET":
            await send_reply(send, request.reply(*health(self.is_draining)))
            return
        attributes = {"http.request.method": request.method, "shoal.request.label": request.label}
        with tracer.start_as_current_span(
            "gateway", context=_propagator.extract(headers), kind=SpanKind.SERVER, attributes=attributes
        ) as span:
            try:
                reply = await self._route(request, tenant, receive, send)
            except BusError as error:
                reply = request.refusal(error.failure)
            if reply is not None:
                await send_reply(send, reply)
            span.set_attribute("url.path", request.path if request.path in POSTS else MODELS_PATH)
            span.set_attribute("http.response.status_code", reply.status if reply else 200)

    async def _route(self, request: Request, tenant: str | None, receive: Receive, send: Send) -> Reply | None:
        """The reply; None if it was streamed. `tenant` is None for a stranger. Raises BusError."""
        if tenant is None:
            raise fail(Code.UNAUTHORIZED, "unknown or missing API key; send it as Bearer token or x-api-key")
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"gateway {self.id} takes no new requests")
        is_models = request.path == MODELS_PATH or request.path.startswith(MODELS_PATH + "/")
        if request.method == "GET" and is_models:
            upload = Upload(self._intake)
            upload.body = models_body(request.path)
            return await self._call_once(request, Protocol.MODELS, tenant, upload)
        protocol = POSTS.get(request.path)
        if request.method != "POST" or protocol is None:
            return not_found(request)
        upload = Upload(self._intake)
        try:
            if not await self._read(upload, receive):
                return None  # the client has gone
            if protocol is Protocol.COUNT_TOKENS:
                return await self._call_once(request, protocol, tenant, upload)
            return await self._exchange(request, protocol, tenant, upload, receive, send)
        finally:
            upload.free()

    async def _read(self, upload: Upload, receive: Receive) -> bool:
        """Take the whole body. False if the client went away before its end. Raises BusError."""
        try:
            body = await asgi.read_body(upload.counting(receive, MAX_BODY_BYTES), MAX_BODY_BYTES)
        except asgi.BodyTooLarge as error:
            raise fail(Code.TOO_LARGE, str(error)) from None
        except IntakeFull as error:
            raise fail(Code.OVERLOADED, str(error)) from None
        upload.body = body or b""
        return body is not None

    async def _call(self, request: Request, protocol: Protocol, tenant: str, upload: Upload, stream_id: int) -> Any:
        """Ask a recipe. Nothing of the body is held when it has answered, or failed to. Raises BusError."""
        if isinstance(deadline_ns := request.deadline_ns(), Failure):
            raise BusError(deadline_ns)
        body = await self._bulk.wrap(upload.body)
        call = Call(
            stream_id=stream_id,
            gateway=self.id,
            protocol=protocol,
            body=body,
            tenant=tenant,
            request_id=request.request_id,
            deadline_ns=deadline_ns,
        )
        try:
            return await self.bus.ask(CALL.any(), call, timeout_s=CALL_TIMEOUT_S)
        finally:
            if body.handle is not None:
                self._bulk.withdraw(body.handle)
            upload.free()

    async def _call_once(self, request: Request, protocol: Protocol, tenant: str, upload: Upload) -> Reply:
        answer = await self._call(request, protocol, tenant, upload, 0)
        return request.answered(answer)

    async def _exchange(
        self, request: Request, protocol: Protocol, tenant: str, upload: Upload, receive: Receive, send: Send
    ) -> Reply | None:
        """One request with its stream. However it ends early, the recipe hears of it."""
        stream = self._reader.open(next(self._stream_ids), stall_s=STALL_S)
        exchange = _Exchange(request, protocol, stream, self._now_s())
        self._exchanges[stream.stream_id] = exchange
        gone = asyncio.create_task(asgi.client_gone(receive), name=f"client/{request.request_id}")
        gone.add_done_callback(lambda _: stream.fail(fail(Code.CANCELLED, "the client has gone")))
        try:
            try:
                answer: Called | Answer = await self._call(request, protocol, tenant, upload, stream.stream_id)
            except BusError as error:
                exchange.is_over = error.code not in _UNANSWERED
                if error.code is Code.DEADLINE_EXCEEDED:
                    why = f"no recipe answered within {CALL_TIMEOUT_S:g} s: a question or an answer was lost on its way"
                    raise fail(Code.WORKER_LOST, why) from None
                raise
            if isinstance(answer, Answer):
                exchange.is_over = True
                return request.answered(answer)
            exchange.recipe = answer.recipe
            if answer.is_stream:
                return await self._stream(exchange, answer, send)
            return await self._collect(exchange, answer)
        finally:
            gone.cancel()
            stream.close()
            del self._exchanges[stream.stream_id]
            self._give_up(exchange, CancelReason.CLIENT_GONE)

    async def _stream(self, exchange: _Exchange, called: Called, send: Send) -> Reply | None:
        """Send events as they come. A request that fails before its first event gets a proper status instead."""
        request, protocol = exchange.request, exchange.protocol
        is_started, num_sent = False, 0
        try:
            async for items in exchange.stream:
                status, exchange.is_over = items[-1].status, items[-1].is_last
                bodies = [item.body for item in items if item.body]
                if not is_started:
                    if status != 200 and len(bodies) == 1:
                        return request.reply(status, bodies[0], retry_after_s=items[-1].retry_after_s)
                    headers = request.stream_headers(called.ignored)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    is_started = True
                num_sent += len(bodies)
                sent = block(protocol, bodies, is_done=exchange.is_over and status == 200)
                await send({"type": "http.response.body", "body": sent, "more_body": not exchange.is_over})
        except BusError as error:
            if not is_started:
                raise
            last = error_event(protocol, error.failure, request.label, num_sent)
            await send({"type": "http.response.body", "body": frame(protocol, [last]), "more_body": False})
        return None

    async def _collect(self, exchange: _Exchange, called: Called) -> Reply:
        """Wait for the one body."""
        async for items in exchange.stream:
            last = items[-1]
            if last.is_last:
                exchange.is_over = True
                reply = exchange.request.reply(last.status, last.body, retry_after_s=last.retry_after_s)
                reply.headers.extend(ignored_header(called.ignored))
                return reply
        raise fail(Code.INTERNAL, "the stream ended without its last item")

    # The recipe's side

    async def _on_stream(self, batch: StreamBatch, envelope: Envelope) -> Taken:
        if behind := self._reader.feed(batch):
            self._ask_after([self._exchanges[stream.stream_id] for stream in behind])
        return Taken()

    def _on_too_slow(self, stream: InStream) -> None:
        exchange = self._exchanges[stream.stream_id]
        log.warning("request %s: its client reads too slowly, and is cancelled", exchange.request.request_id)
        self._give_up(exchange, CancelReason.CLIENT_TOO_SLOW)

    def _give_up(self, exchange: _Exchange, reason: CancelReason) -> None:
        """Whoever works on it hears that nobody waits for it, unless it is over."""
        if not exchange.is_over:
            exchange.is_over = True
            cancel = Cancel(request_id=exchange.request.request_id, reason=reason)
            self.spawn(self._cancel(exchange.recipe, cancel))

    async def _cancel(self, recipe: str, cancel: Cancel) -> None:
        """Tell its recipe; all of them, if it is not known which took it."""
        try:
            if recipe:
                await self.bus.ask(RECIPE_CANCEL.at(recipe), cancel, timeout_s=ASK_TIMEOUT_S)
            else:
                await self.bus.tell(RECIPE_CANCEL.all(), cancel)
        except BusError as error:
            log.warning("cancel of %s at recipe %s: %s", cancel.request_id, recipe, error)

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        for recipe in exited.ids(Role.RECIPE):
            self._lose(recipe)

    def _lose(self, recipe: str) -> None:
        for exchange in list(self._exchanges.values()):
            if exchange.recipe == recipe:
                exchange.stream.fail(fail(Code.WORKER_LOST, "the process that held the request ended"))

    async def _watch(self) -> None:
        """Keep silent streams alive, and ask after them."""
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = self._now_s()
            silent = [exchange for exchange in self._exchanges.values() if exchange.is_silent(now_s)]
            for exchange in silent:
                if exchange.needs_keep_alive(now_s):
                    exchange.stream.put(KEEP_ALIVE, False, 200)
            self._ask_after(silent)

    def _ask_after(self, exchanges: list[_Exchange]) -> None:
        asked = [exchange for exchange in exchanges if exchange.recipe and not exchange.is_asked_after]
        for recipe, some in by_recipe(asked).items():
            for exchange in some:
                exchange.is_asked_after = True
            self.spawn(self._probe(recipe, some))

    async def _probe(self, recipe: str, exchanges: list[_Exchange]) -> None:
        """Ask a recipe how far these streams are. It sends lost items again; or it may have forgotten the stream."""
        streams = [exchange.stream for exchange in exchanges]
        probe = Probe(
            gateway=self.id, stream_ids=[s.stream_id for s in streams], from_seqs=[s.next_seq for s in streams]
        )
        try:
            probed = await self.bus.ask(PROBE.at(recipe), probe, timeout_s=ASK_TIMEOUT_S)
        except BusError as error:
            if error.code is Code.NO_RESPONDERS:
                self._lose(recipe)
            return
        finally:
            for exchange in exchanges:
                exchange.is_asked_after = False
        for exchange, next_seq in zip(exchanges, probed.next_seqs, strict=True):
            if next_seq == exchange.stream.next_seq:
                exchange.stream.touched = self._now_s()
            if exchange.is_lost(next_seq):
                exchange.stream.fail(fail(Code.WORKER_LOST, "the recipe does not know this request any more"))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
