"""The recipe: protocol JSON in, tokens out; tokens in, protocol events out."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs
from opentelemetry import trace

from actors.recipe.card import ModelCard
from actors.recipe.converter import Converter, Draft, load_converter
from actors.recipe.doors import GatewayDoor, InboxDoor
from actors.recipe.fetch import FETCH, Fetch
from actors.recipe.fields import Refusal
from actors.recipe.front import cancel_body, client_of, read_call, read_cancel
from actors.recipe.images import files_of, split
from actors.recipe.intake import Intake
from actors.recipe.protocol import AT_ONCE
from actors.recipe.request import OpenRequest, Outcome, refused
from actors.recipe.requests import OpenRequests, resends, resent, shard_of
from actors.recipe.shards import Shards
from actors.recipe.submission import Submission
from actors.recipe.windows import Windows
from actors.rules.errors import error_body
from actors.rules.tenants import Tenants, new_id
from bus import subjects
from bus.actor import Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, Delivery, fail
from bus.entrypoints import ask_after, cancel_all, cancel_at, submit
from bus.fetches import Fetches
from bus.images import AnyVision
from bus.limits import AnyQuota
from bus.metrics import record_request
from bus.public import PublicActor
from bus.subjects import CANCEL, EXITED, LOAD, STREAM, Address, Subject
from bus.writer import StreamWriter
from schemas.api import Answer, Call, Probe, Probed, Protocol
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, CancelReason, Resend, Taken, TokensEmitted
from schemas.routing import LoadReported, ReportLoad
from schemas.vision import ImageResolved

INLINE_BODY_BYTES = 8 * 1024
"""Larger bodies are encoded in a thread: 64 KiB take about 30 ms (the library lets go of the interpreter lock)."""

WATCH_S = 1.0
STOP_S = 0.5

_OWNERS = (Role.ENTRYPOINT, Role.QUOTA)


class Recipe(PublicActor):
    """Serves one model card to gateways (`CALL`) and NATS clients (`shoal.api.>`), to each tenant within its limits."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus, bulk: Bulk, card: ModelCard, tenants: Tenants, fetch: Fetch = FETCH) -> None:
        super().__init__(id, bus)
        self._bulk, self._card, self._tenants = bulk, card, tenants
        self._converter: Converter  # from on_start on
        self._open = OpenRequests()
        self._intake = Intake()
        self._writer = StreamWriter(bus, bulk, Windows(), self.wake, lambda to: self._lose_gateway(to.split(".")[2]))
        self._shards = Shards()
        self._vision = AnyVision(bus, bulk)
        self._fetches = Fetches(bus, fetch)
        self._quotas = Shards()
        self._quota = AnyQuota(bus, lambda tenant, tried: self._quotas.owner(tenant, tried, self.now_s()))

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {
            subjects.CALL: self._on_call,
            subjects.RECIPE_CANCEL: self._on_cancel,
            subjects.RECIPE_TOKENS: self._on_tokens,
            subjects.PROBE: self._on_probe,
        }

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {**{LOAD.at(role): self._on_load for role in _OWNERS}, EXITED.all(): self._on_exited}

    async def on_start(self) -> None:
        self._converter = await self.bus.seams.run_beside(functools.partial(load_converter, self._card))
        for role in _OWNERS:
            await self.bus.tell(subjects.report_load(role).all(), ReportLoad())
        await self.listen_to_clients()
        self.spawn(self._watch())

    async def on_stop(self) -> None:
        for request in self._open:
            self._over(request, request.fail(Failure(code=Code.SHUTTING_DOWN, message="the recipe is stopping")))
            if request.shard:
                await self.bus.tell(CANCEL.at(request.shard), Cancel(request_id=request.sent_as))
        await self.flush()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=STOP_S)  # the word to quota actors of what was used

    def load(self) -> LoadReported:
        return structs.replace(super().load(), num_running=len(self._open), num_waiting=self._writer.num_waiting)

    async def flush(self) -> None:
        await self._writer.flush()
        await super().flush()

    async def _on_call(self, call: Call, envelope: Envelope) -> None:
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"recipe {self.id} takes no new requests")
        try:
            self._begin(call, envelope, None)
        except Refusal as refusal:
            raise BusError(refusal.failure) from None

    def _begin(self, call: Call, envelope: Envelope, inbox: InboxDoor | None) -> None:
        """Start on a call, at once: a cancel right behind it must find it. Raises Refusal if it is one too many."""
        if call.protocol not in AT_ONCE:
            self._open.check_free(call.request_id)
        self._intake.take(len(self._open), call.body.size_bytes)
        if call.protocol in AT_ONCE:
            self.spawn(self._answer(call, envelope, inbox))
            return
        door = inbox or GatewayDoor(call.gateway, self._writer.open(STREAM.at(call.gateway), call.stream_id))
        request = self._open.begin(call, door, envelope.context, self.now_s())
        self.spawn(self._serve(request, call, envelope))

    async def _answer(self, call: Call, envelope: Envelope, inbox: InboxDoor | None) -> None:
        with self._intake.working(call.body.size_bytes):
            if inbox is None:
                await envelope.answer(await self._answer_to(call))
            elif call.protocol is Protocol.CANCEL:
                inbox.reply(await self._cancel_public(call, client_of(inbox.inbox)))
            else:
                inbox.reply((await self._answer_to(call)).body)
        self.wake()

    async def _answer_to(self, call: Call) -> Answer:
        """Models, or a count of tokens."""
        try:
            if call.protocol is Protocol.MODELS:
                return Answer(status=200, body=self._converter.models(await self._bulk.unwrap(call.body)))
            draft, images = await self._read(call, lambda: False)
            self._release(images)
            return Answer(status=200, body=self._converter.count(draft, images))
        except (Refusal, BusError) as error:
            return refused(call, error.failure)

    async def _read(self, call: Call, is_over: Callable[[], bool]) -> tuple[Draft, list[ImageResolved]]:
        """What its body says and its images are. Raises BusError and Refusal; then no image is held for us."""
        read = functools.partial(self._converter.read, call.protocol, await self._bulk.unwrap(call.body))
        draft = read() if call.body.size_bytes <= INLINE_BODY_BYTES else await self.bus.seams.run_beside(read)
        urls = [image.url for image in draft.images if image.url]
        async with self._fetches.files(urls, call.tenant, call.deadline_ns, is_over) as fetched:
            found = await self._vision.resolve(files_of(draft.images, fetched), call.deadline_ns, is_over)
        images, refusal = split(draft.images, found)
        if refusal is not None:
            self._release(images)
            raise refusal
        return draft, images

    async def _serve(self, request: OpenRequest, call: Call, envelope: Envelope) -> None:
        """Take one request up to its submission. What follows comes by `_on_tokens`."""
        images: list[ImageResolved] = []
        try:
            with trace.use_span(request.span, end_on_exit=False):
                with self._intake.working(call.body.size_bytes):
                    draft, images = await self._read(call, lambda: request.is_cancelled)
                    seed, is_quick = self.bus.seams.random.getrandbits(63), self._converter.is_quick(draft)
                    finish = functools.partial(self._converter.finish, draft, images, seed)
                    prepared = finish() if is_quick else await self.bus.seams.run_beside(finish)
                    del draft, finish  # with the files of its images
                submission = prepared.submission(call, self.id, self._tenants.cache(call.tenant))
                request.begin(self._converter, prepared, self.bus.seams.clock_ns() // 10**9, submission)
                if self._tenants.get(call.tenant).is_limited:
                    await self._quota.admit(submission.admit(), lambda: request.is_cancelled)
                await self._submit(request, submission)
            await envelope.answer(request.called(self.id, prepared.ignored))
        except (Refusal, BusError) as error:
            self._release(images)
            outcome = request.fail(error.failure)
            if isinstance(request.door, InboxDoor):
                self._over(request, outcome)
                self.wake()
            else:
                self._close(request, outcome)
                await envelope.answer(outcome.answer())

    def _release(self, images: list[ImageResolved]) -> None:
        self.spawn(self._vision.release([(image.vision, image.pixels) for image in images]))

    async def _submit(self, request: OpenRequest, submission: Submission) -> None:
        owner, rename = self._shards.owner_of(request.id, self.now_s), functools.partial(self._open.rename, request)
        await submit(self.bus, self._bulk, request, submission, owner, rename)

    def _move(self, request: OpenRequest, loss: Failure) -> None:
        """Its shard is lost, and another one is to go on with it; else it ends so. Who is being placed still is so."""
        if not self._open.move(request, self.now_s()):
            self._over(request, request.fail(loss))
        elif request.submission is not None and not request.is_placing:
            self.spawn(self._go_on(request, request.submission, loss))

    async def _go_on(self, request: OpenRequest, submission: Submission, loss: Failure) -> None:
        try:
            await self._submit(request, submission)
        except BusError as error:
            self._over(request, request.fail(error.failure if request.is_cancelled else loss))
            self.wake()

    def on_client(self, protocol: Protocol, tenant: str, delivery: Delivery) -> None:
        fresh_bits = self.bus.seams.random.getrandbits(128)
        call, trace_headers = read_call(protocol, tenant, delivery, new_id(tenant, fresh_bits))
        self.enqueue(self._on_public, call, delivery._replace(headers=trace_headers), is_ask=False)

    def refuse_client(self, protocol: Protocol, delivery: Delivery, failure: Failure) -> None:
        self._inbox(delivery.reply, "").reply(error_body(protocol, failure, ""))

    async def _on_public(self, call: Call, envelope: Envelope) -> None:
        inbox = self._inbox(envelope.reply_to, call.request_id)
        try:
            self._begin(call, envelope, inbox)
        except Refusal as refusal:
            inbox.reply(error_body(call.protocol, refusal.failure, call.request_id))

    def _inbox(self, reply_to: str, request_id: str) -> InboxDoor:
        on_fate = functools.partial(self._on_inbox_fate, request_id, reply_to)
        return InboxDoor(reply_to, self.outbox, on_fate, self.bus.wire.max_payload)

    async def _cancel_public(self, call: Call, client: str) -> bytes:
        """Cancel by any id a client may know, wherever the request is; another tenant's is as good as unknown."""
        try:
            id, candidates = read_cancel(call.body.inline, call.tenant, client)
        except Refusal as refusal:
            return error_body(call.protocol, refusal.failure, call.request_id)
        was_here, elsewhere = self._open.cancel(candidates, self._shards.alive(self.now_s()))
        return cancel_body(id, await cancel_all(self.bus, elsewhere) or was_here)

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        self._apply(emitted)
        return Taken()

    def _apply(self, emitted: TokensEmitted) -> None:
        outcomes, unknown = self._open.apply(emitted, self.now_s())
        for request, outcome in outcomes:
            try:
                if outcome.is_last:
                    self._over(request, outcome)
                    continue
                if outcome.items:
                    request.door.put(outcome.items)
                if outcome.loss is not None:
                    self._move(request, outcome.loss)
                elif outcome.is_gap and not request.is_resending:
                    self._ask_after([request])
            except BusError:  # too much is held for pulling: this request gives way, the others go on
                self.spawn(self._abandon(request, CancelReason.CLIENT_GONE))
        for request_id in unknown:
            self.spawn(cancel_at(self.bus, shard_of(emitted), request_id, CancelReason.CLIENT_GONE))

    def _over(self, request: OpenRequest, outcome: Outcome) -> None:
        """The terminal event: the last items go out, and the request is forgotten."""
        if request.is_closed:
            return
        request.door.put(outcome.items, is_last=True, status=outcome.status, retry_after_s=outcome.retry_after_s)
        self._close(request, outcome)
        if outcome.must_cancel is not None:
            self.spawn(cancel_at(self.bus, request.shard, request.sent_as, outcome.must_cancel))

    def _close(self, request: OpenRequest, outcome: Outcome) -> None:
        """Nothing more will come of it."""
        self._open.remove(request)
        if usage := request.close(outcome, self.now_s()):
            record_request(**usage)
        if self._quota.is_asked(request.id):
            self.spawn(self._quota.end(request.id, usage["num_output"] if usage else 0))

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged | None:
        if (request := self._open.get(cancel.request_id)) is None:
            return CancelAcknowledged(request_id=cancel.request_id, was_running=False)
        self.spawn(self._abandon(request, cancel.reason, envelope))
        return None

    async def _abandon(self, request: OpenRequest, reason: CancelReason, envelope: Envelope | None = None) -> None:
        """Nobody waits for this request any more: free it everywhere, then acknowledge."""
        request.is_cancelled = True
        if request.shard:
            self._close(request, request.fail(Failure(code=Code.CANCELLED, message=reason)))
            await cancel_at(self.bus, request.shard, request.sent_as, reason)
        if envelope is not None:
            await envelope.answer(CancelAcknowledged(request_id=request.id, was_running=True))

    def _lose_gateway(self, gateway: str) -> None:
        """Nobody is there: its clients are gone with it."""
        for request in self._open.of_gateway(gateway):
            self.spawn(self._abandon(request, CancelReason.CLIENT_GONE))

    def _on_inbox_fate(self, request_id: str, inbox: str, is_taken: bool) -> None:
        request = self._open.get(request_id)
        if not is_taken and request is not None and request.is_for(inbox):
            self.spawn(self._abandon(request, CancelReason.CLIENT_GONE))

    async def _on_probe(self, probe: Probe, envelope: Envelope) -> Probed:
        address, asked = STREAM.at(probe.gateway), itertools.zip_longest(probe.stream_ids, probe.from_seqs)
        return Probed(next_seqs=[self._writer.repair(address, stream_id, from_seq) for stream_id, from_seq in asked])

    async def _on_load(self, report: LoadReported, envelope: Envelope) -> None:
        if report.role == Role.QUOTA:
            self._quotas.saw(report, self.now_s())
        elif self._shards.saw(report, self.now_s()):
            # It may have restarted: asked, it says so of each request that it does not know.
            self._ask_after(self._open.of_shard(report.id))

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        self._vision.on_exited(exited)
        for shard in self._shards.ended(exited):
            self._lose_shard(shard)
        for gateway in exited.ids(Role.GATEWAY):
            self._lose_gateway(gateway)

    def _lose_shard(self, shard: str) -> None:
        self._shards.forget(shard)
        failure = Failure(code=Code.WORKER_LOST, message=f"the entrypoint {shard} that held the request was lost")
        for request in self._open.of_shard(shard):
            self._move(request, failure)
        self.wake()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._ask_after(self._open.silent(self.now_s()))
            self._writer.prune()

    def _ask_after(self, requests: list[OpenRequest]) -> None:
        for shard, some, resend in resends(requests):
            self.spawn(self._resend(shard, some, resend))

    async def _resend(self, shard: str, requests: list[OpenRequest], resend: Resend) -> None:
        """Ask a shard for what was missed of these requests; find out whether it is there, and knows them."""
        try:
            if (emitted := await ask_after(self.bus, shard, resend)) is not None:
                self._apply(emitted)
                self._shards.answered(shard)
                self.wake()
        except BusError as error:
            if self._shards.was_silent(shard) or error.code is Code.NO_RESPONDERS:
                self._lose_shard(shard)
        resent(requests)
