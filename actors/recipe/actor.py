"""The recipe: protocol JSON in, tokens out; tokens in, protocol events out."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs
from opentelemetry import trace
from opentelemetry.context import Context

from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter, Prepared
from actors.recipe.doors import SENTINEL, Door, GatewayDoor, InboxDoor
from actors.recipe.fields import Refusal
from actors.recipe.front import cancel_body, read_call, read_cancel
from actors.recipe.requests import OpenRequest, OpenRequests, Outcome, resends, resent, shard_of
from actors.rules.errors import error_body
from actors.rules.owner import Members, choose
from actors.rules.window import Window
from bus import subjects
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, Delivery, fail
from bus.metrics import record_request
from bus.stream import StreamWriter
from bus.subjects import CANCEL, EXITED, LOAD, RESEND, STREAM, SUBMIT, Address, Subject
from schemas.api import Call, Probe, Probed, Protocol
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, CancelReason, Resend, Taken, TokensEmitted
from schemas.routing import LoadReported, ReportLoad

tracer = trace.get_tracer("shoal")

INLINE_BODY_BYTES = 8 * 1024
"""Larger bodies are encoded in a thread: 64 KiB take about 30 ms (the library lets go of the interpreter lock)."""

ASK_TIMEOUT_S = 5.0
WATCH_S = 1.0
MAX_STRIKES = 3
"""So many questions in a row without an answer, and a shard counts as lost."""


class Recipe(Actor):
    """Serves one model card to gateways (`CALL`) and to NATS clients (`shoal.api.>`)."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus, bulk: Bulk, card: ModelCard) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._converter = Converter(card)
        self._open = OpenRequests()
        self._writer = StreamWriter(bus, bulk, self._on_gateway_fate)
        self._windows: defaultdict[str, Window] = defaultdict(Window)  # by gateway's address
        self._outbox: list[tuple[InboxDoor, bytes]] = []
        self._shards = Members()
        self._strikes: Counter[str] = Counter()
        self._public: list[Callable[[], Any]] = []

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {
            subjects.CALL: self._on_call,
            subjects.RECIPE_CANCEL: self._on_cancel,
            subjects.RECIPE_TOKENS: self._on_tokens,
            subjects.PROBE: self._on_probe,
        }

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {LOAD.at(Role.ENTRYPOINT): self._on_load, EXITED.all(): self._on_exited}

    async def on_start(self) -> None:
        await self.bus.tell(subjects.report_load(Role.ENTRYPOINT).all(), ReportLoad())
        for protocol in Protocol:
            listen = functools.partial(self._on_public_delivery, protocol)
            self._public.append(await self.bus.wire.subscribe(subjects.api(protocol), listen, queue=self.role))
        self._unsubscribes.extend(self._public)
        self.spawn(self._watch())

    async def on_stop(self) -> None:
        for request in self._open:
            self._over(request, request.fail(Failure(code=Code.SHUTTING_DOWN, message="the recipe is stopping")))
            if request.shard:
                await self.bus.tell(CANCEL.at(request.shard), Cancel(request_id=request.id))
        await self.flush()

    async def drain(self) -> None:
        await asyncio.gather(*(unsubscribe() for unsubscribe in self._public))
        await super().drain()

    def load(self) -> LoadReported:
        return structs.replace(super().load(), num_running=len(self._open))

    async def flush(self) -> None:
        now_s = self._now_s()
        await self._writer.flush(
            lambda destination: self._windows[destination].may_send(now_s),
            lambda destination: self._windows[destination].sent(now_s),
        )
        messages, self._outbox[:] = list(self._outbox), []
        for door, body in messages:
            await self.bus.publish(door.inbox, body, on_fate=door.on_fate)
            if body == SENTINEL:
                self.bus.forget(door.inbox, door.on_fate)

    async def _on_call(self, call: Call, envelope: Envelope) -> None:
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"recipe {self.id} takes no new requests")
        if call.protocol in (Protocol.MODELS, Protocol.COUNT_TOKENS):
            self.spawn(self._answer(call, envelope))
            return
        stream = self._writer.open(STREAM.at(call.gateway), call.stream_id)
        self.spawn(self._serve(call, GatewayDoor(call.gateway, stream), envelope.context, envelope))

    async def _answer(self, call: Call, envelope: Envelope) -> None:
        answer = await self._compute(call, self._converter.answer, call)
        await (envelope.answer(answer) if call.gateway else self._reply(envelope.reply_to, answer.body))

    async def _compute(self, call: Call, work: Callable[..., Any], *args: Any) -> Any:
        """Run a conversion; beside the loop if it is long."""
        if len(call.body) <= INLINE_BODY_BYTES:
            return work(*args)
        return await asyncio.to_thread(work, *args)

    async def _serve(self, call: Call, door: Door, context: Context, envelope: Envelope | None) -> None:
        """Take one request up to its submission. What follows comes by `_on_tokens`."""
        now_s = self._now_s()
        span = tracer.start_span("recipe", context=context, attributes={"shoal.request.id": call.request_id})
        request = OpenRequest(call.request_id, call.protocol, door, span, started_s=now_s, last_event_s=now_s)
        try:
            if not self._open.add(request):
                raise fail(Code.DUPLICATE_REQUEST, "a request with this id is still running")
            with trace.use_span(span, end_on_exit=False):
                seed = self.bus.seams.random.getrandbits(63)
                prepared: Prepared = await self._compute(call, self._converter.prepare, call.protocol, call.body, seed)
                request.begin(self._converter, prepared, self.bus.seams.clock_ns() // 10**9)
                await self._submit(request, call, prepared)
            if envelope is not None:
                await envelope.answer(request.called(self.id, prepared.ignored))
        except (Refusal, BusError) as error:
            await self._refuse_request(request, error.failure, envelope)

    async def _submit(self, request: OpenRequest, call: Call, prepared: Prepared) -> None:
        """Give the request to the shard its id belongs to; to the next one if that is gone. Raises BusError."""
        tried: set[str] = set()
        while request.is_wanted():
            shards = [shard for shard in self._shards.alive(self._now_s()) if shard not in tried]
            shard = choose(request.id, shards) if shards else ""
            submit = prepared.submit(call, self.id, await self._bulk.wrap(prepared.prompt))
            try:
                address = SUBMIT.at(shard) if shard else SUBMIT.any()  # none has reported itself yet
                submitted = await self.bus.ask(address, submit, timeout_s=ASK_TIMEOUT_S)
            except BusError as error:
                if error.code not in (Code.NO_RESPONDERS, Code.SHUTTING_DOWN) or not shard:
                    raise
                tried.add(shard)
                continue
            request.shard = submitted.shard
            if not request.is_wanted():
                self.spawn(self._cancel_at(request.shard, request.id, CancelReason.CLIENT))
            return
        raise fail(Code.CANCELLED, "the request was cancelled")

    async def _refuse_request(self, request: OpenRequest, failure: Failure, envelope: Envelope | None) -> None:
        """Answer a request that has not begun."""
        outcome = request.fail(failure)
        if envelope is None:
            self._over(request, outcome)
            self.wake()
        else:
            self._close(request, outcome)
            await envelope.answer(outcome.answer())

    def _on_public_delivery(self, protocol: Protocol, delivery: Delivery) -> None:
        # A broker checks where clients publish, not where they let us answer: only an inbox is a place for that.
        if subjects.is_inbox(delivery.reply):
            bits = self.bus.seams.random.getrandbits(128)
            call, trace_headers = read_call(protocol, delivery.body, delivery.headers, f"{bits:032x}")
            self.enqueue(self._on_public, call, delivery._replace(headers=trace_headers), is_ask=False)

    def _refuse(self, delivery: Delivery, failure: Failure) -> None:
        if delivery.subject.startswith(subjects.API_PREFIX):
            protocol = Protocol(delivery.subject.rpartition(".")[2])
            self.spawn(self._reply(delivery.reply, error_body(protocol, failure, "")))
        else:
            super()._refuse(delivery, failure)

    async def _on_public(self, call: Call, envelope: Envelope) -> None:
        if call.protocol is Protocol.CANCEL:
            self.spawn(self._cancel_public(call, envelope.reply_to))
        elif call.protocol in (Protocol.MODELS, Protocol.COUNT_TOKENS):
            self.spawn(self._answer(call, envelope))
        else:
            on_fate = functools.partial(self._on_inbox_fate, call.request_id)
            door = InboxDoor(envelope.reply_to, self._outbox, on_fate, self.bus.wire.max_payload)
            self.spawn(self._serve(call, door, envelope.context, None))

    async def _reply(self, inbox: str, body: bytes) -> None:
        await self.bus.publish(inbox, body)
        await self.bus.publish(inbox, SENTINEL)

    async def _cancel_public(self, call: Call, inbox: str) -> None:
        """Cancel by any id a client may know, wherever the request is."""
        try:
            id, candidates = read_cancel(call.body)
        except Refusal as refusal:
            await self._reply(inbox, error_body(call.protocol, refusal.failure, call.request_id))
            return
        was_running = False
        for request_id in candidates:
            request = self._open.get(request_id)
            if request is not None:
                was_running = request.is_cancelled = True
            for shard in [request.shard] if request and request.shard else self._shards.alive(self._now_s()):
                was_running |= await self._cancel_at(shard, request_id, CancelReason.CLIENT)
        await self._reply(inbox, cancel_body(id, was_running))

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        self._apply(emitted)
        return Taken()

    def _apply(self, emitted: TokensEmitted) -> None:
        outcomes, unknown = self._open.apply(emitted, self._now_s())
        for request, outcome in outcomes:
            try:
                if outcome.is_last:
                    self._over(request, outcome)
                elif outcome.items:
                    request.door.put(outcome.items)
                elif outcome.is_gap and not request.is_resending:
                    self._ask_after([request])
            except BusError:  # too much is held for pulling: this request gives way, the others go on
                self.spawn(self._abandon(request, CancelReason.CLIENT_GONE))
        for request_id in unknown:
            self.spawn(self._cancel_at(shard_of(emitted), request_id, CancelReason.CLIENT_GONE))

    def _over(self, request: OpenRequest, outcome: Outcome) -> None:
        """The terminal event: the last items go out, and the request is forgotten."""
        if request.is_closed:
            return
        request.door.put(outcome.items, is_last=True, status=outcome.status)
        self._close(request, outcome)
        if outcome.must_cancel is not None:
            self.spawn(self._cancel_at(request.shard, request.id, outcome.must_cancel))

    def _close(self, request: OpenRequest, outcome: Outcome) -> None:
        """Nothing more will come of it."""
        self._open.remove(request)
        if usage := request.close(outcome, self._now_s()):
            record_request(**usage)

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged | None:
        request = self._open.get(cancel.request_id)
        if request is None:
            return CancelAcknowledged(request_id=cancel.request_id, was_running=False)
        self.spawn(self._abandon(request, cancel.reason, envelope))
        return None

    async def _abandon(self, request: OpenRequest, reason: CancelReason, envelope: Envelope | None = None) -> None:
        """Nobody waits for this request any more: free it everywhere, then acknowledge."""
        request.is_cancelled = True
        if request.shard:
            self._close(request, request.fail(Failure(code=Code.CANCELLED, message=reason)))
            await self._cancel_at(request.shard, request.id, reason)
        if envelope is not None:
            await envelope.answer(CancelAcknowledged(request_id=request.id, was_running=True))

    async def _cancel_at(self, shard: str, request_id: str, reason: CancelReason) -> bool:
        """Tell the shard until it acknowledges, or is gone. True if the request was running there."""
        for _ in range(MAX_STRIKES):
            try:
                cancel = Cancel(request_id=request_id, reason=reason)
                return (await self.bus.ask(CANCEL.at(shard), cancel, timeout_s=ASK_TIMEOUT_S)).was_running
            except BusError as error:
                if error.code is not Code.DEADLINE_EXCEEDED:
                    break
        return False

    def _on_gateway_fate(self, destination: str, is_taken: bool) -> None:
        """A receipt opens the window to a gateway. Nobody there: its clients are gone with it."""
        if is_taken:
            self._windows[destination].taken(self._now_s())
            self.wake()
        else:
            self._windows.pop(destination, None)
            self._lose_gateway(destination.split(".")[2])

    def _lose_gateway(self, gateway: str) -> None:
        for request in self._open.of_gateway(gateway):
            self.spawn(self._abandon(request, CancelReason.CLIENT_GONE))

    def _on_inbox_fate(self, request_id: str, is_taken: bool) -> None:
        request = self._open.get(request_id)
        if not is_taken and request is not None:
            self.spawn(self._abandon(request, CancelReason.CLIENT_GONE))

    async def _on_probe(self, probe: Probe, envelope: Envelope) -> Probed:
        return self._open.probed(probe)

    async def _on_load(self, report: LoadReported, envelope: Envelope) -> None:
        if not report.is_accepting:
            self._shards.forget(report.id)
        elif self._shards.saw(report.id, report.incarnation, self._now_s()):
            # It may have restarted: asked, it says so of each request that it does not know.
            self._ask_after(self._open.of_shard(report.id))

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        for member in exited.members:
            role, _, id = member.partition("/")
            if role == Role.ENTRYPOINT:
                self._lose_shard(id)
            elif role == Role.GATEWAY:
                self._lose_gateway(id)

    def _lose_shard(self, shard: str) -> None:
        self._shards.forget(shard)
        self._strikes.pop(shard, None)
        failure = Failure(code=Code.WORKER_LOST, message=f"the entrypoint {shard} that held the request was lost")
        for request in self._open.of_shard(shard):
            self._over(request, request.fail(failure))
        self.wake()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._ask_after(self._open.silent(self._now_s()))

    def _ask_after(self, requests: list[OpenRequest]) -> None:
        for shard, some, resend in resends(requests):
            self.spawn(self._resend(shard, some, resend))

    async def _resend(self, shard: str, requests: list[OpenRequest], resend: Resend) -> None:
        """Ask a shard for what was missed of these requests; find out whether it is there, and knows them."""
        try:
            self._apply(await self.bus.ask(RESEND.at(shard), resend, timeout_s=ASK_TIMEOUT_S))
            self._strikes.pop(shard, None)
            self.wake()
        except BusError as error:
            self._strikes[shard] += 1
            if error.code is Code.NO_RESPONDERS or self._strikes[shard] >= MAX_STRIKES:
                self._lose_shard(shard)
        resent(requests)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
