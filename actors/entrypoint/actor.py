"""The entrypoint shard: owns its requests from submit to their one terminal event, and alone issues epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec import structs
from opentelemetry import trace
from opentelemetry.trace import Span

from actors.entrypoint.request import Owner, Request, Verdict
from actors.entrypoint.shard import Shard
from actors.rules.outbox import Outbox
from actors.rules.spans import end_span
from bus import subjects
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.courier import Courier
from bus.images import AnyVision
from bus.insist import insist
from bus.place import place
from bus.subjects import DISPATCH, EXITED, RELEASE_PREFILL, ROUTE_PREFILL, TOKENS, Address, Subject
from schemas.failure import Code, Failure
from schemas.handover import Claim, Claimed, ClaimRefused, Dispatch, Refused
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import (
    Cancel,
    CancelAcknowledged,
    Cancelled,
    CancelReason,
    End,
    Failed,
    Finished,
    FinishReason,
    Resend,
    Submit,
    Submitted,
    Taken,
    TokensEmitted,
)
from schemas.routing import LoadReported, Route, Routed

tracer = trace.get_tracer("shoal")

ROUTE_PATIENCE_S = 20.0
"""How long a request waits for a replica to appear or to have room: a worker restarts within this time."""

ASK_S = 5.0
DISPATCH_S = 10.0
"""Longer than a prefill replica may take to pull a long prompt."""

WATCH_S = 1.0
MAX_STRIKES = 3
"""So many probes in a row without an answer, and an owner counts as lost (a stopped process keeps its socket)."""


class Entrypoint(Actor):
    """See `shard.py` and `request.py` for the decisions; here is only who is asked and told."""

    role = Role.ENTRYPOINT

    def __init__(self, id: str, bus: Bus, bulk: Bulk) -> None:
        super().__init__(id, bus)
        self.shard = Shard(id, first_epoch=bus.seams.random.getrandbits(30) << 32)
        self._bulk = bulk
        self._outbox = Outbox(f"{self.role}/{id}")
        self._courier = Courier(bus, subjects.RECIPE_TOKENS, self._outbox, self.wake, self._abandon)
        self._spans: dict[str, Span] = {}
        self._strikes: dict[Owner, int] = {}
        self._repairing: set[str] = set()
        self._encoding: set[str] = set()
        self._vision = AnyVision(bus, bulk)

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {
            subjects.SUBMIT: self._on_submit,
            subjects.CANCEL: self._on_cancel,
            subjects.CLAIM: self._on_claim,
            subjects.TOKENS: self._on_tokens,
            subjects.RESEND: self._on_resend,
        }

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {EXITED.all(): self._on_exited}

    async def on_start(self) -> None:
        self.spawn(self._watch())

    async def on_stop(self) -> None:
        stopping = Failed(failure=Failure(code=Code.SHUTTING_DOWN, message="the system is stopping"))
        for request in list(self.shard.live()):
            self._end(request, stopping)
        await self.flush()

    def load(self) -> LoadReported:
        return structs.replace(super().load(), num_running=self.shard.num_live)

    async def flush(self) -> None:
        await self._courier.flush()

    # From recipe

    async def _on_submit(self, submit: Submit, envelope: Envelope) -> Submitted:
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"entrypoint {self.id} takes no new requests")
        if self.shard.holds(submit):
            return Submitted(shard=self.id)
        request = self.shard.submit(submit, self.now_s())
        if request is None:
            raise fail(Code.DUPLICATE_REQUEST, f"a request with the id {submit.request_id} is running")
        span = tracer.start_span("entrypoint", context=envelope.context)
        span.set_attribute("shoal.request.id", request.id)
        span.set_attribute("gen_ai.usage.input_tokens", submit.num_prompt_tokens)
        span.set_attribute("shoal.exact", submit.exact)
        self._spans[request.id] = span
        self.spawn(self._place(request, span))
        return Submitted(shard=self.id)

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged | None:
        request = self.shard.get(cancel.request_id)
        if request is None or request.end is not None:
            return CancelAcknowledged(request_id=cancel.request_id, was_running=False)
        end: End = Cancelled()
        if cancel.reason is CancelReason.STOP_SEQUENCE:
            end = Finished(reason=FinishReason.STOP)
        self._end(request, end)
        self.spawn(self._cancel(request, envelope))
        return None

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        return self.shard.resend(resend)

    # From prefill and decode

    async def _on_claim(self, claim: Claim, envelope: Envelope) -> Claimed | ClaimRefused:
        request = self.shard.get(claim.request_id)
        if request is None:
            return ClaimRefused(reason=f"entrypoint {self.id} does not know this request")
        return request.claim(claim.from_epoch, claim.replica, self.now_s())

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        ends = dict(emitted.ends)
        now_s, start = self.now_s(), 0
        for i, request_id in enumerate(emitted.request_ids):
            stop = start + emitted.counts[i]
            tokens, start = emitted.tokens[start:stop], stop
            request = self.shard.get(request_id)
            epoch, end = emitted.epochs[i], ends.get(i)
            if request is None or request.epoch != epoch or request.end is not None:
                if end is None and self.shard.is_new_stray(emitted.source, request_id, now_s):
                    self.spawn(self._cancel_at(_holder(emitted.source), request_id, epoch))
                continue
            known = len(request.tokens)
            verdict = self.shard.accept(request, epoch, emitted.first_indexes[i], tokens, end, now_s)
            if verdict is Verdict.NEWS:
                recipe, news = request.submit.recipe, request.tokens[known:]
                self._outbox.add(recipe, request.id, request.epoch, known, news, request.end)
                if end is not None:
                    self._close_span(request)
            elif verdict is Verdict.GAP and request_id not in self._repairing:
                assert request.owner is not None  # a current epoch has an owner
                self._repairing.add(request_id)
                self.spawn(self._probe(request.owner, [request]))
        return Taken()

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        for role in (Role.PREFILL, Role.DECODE):
            for id in exited.ids(role):
                self._lose(Owner(role, id), f"the process {exited.name} ended")
        self._vision.on_exited(exited)

    # Placing

    async def _place(self, request: Request, span: Span) -> None:
        """Route and dispatch until a prefill replica has the request, it ended, or patience did."""
        with trace.use_span(span):
            try:
                request.prompt = await self._bulk.unwrap(request.submit.prompt)
                await self._encode(request)
                await place(
                    self.bus,
                    ROUTE_PREFILL,
                    RELEASE_PREFILL,
                    Route(request_id=request.id, num_new=request.submit.num_prompt_tokens),
                    lambda routed: self._dispatch(request, routed),
                    patience_s=ROUTE_PATIENCE_S,
                    is_over=lambda: request.end is not None,
                )
            except BusError as error:
                self._end(request, Failed(failure=error.failure))
        await self._vision.release(request.held())
        if request.end is not None and request.owner is not None:
            await self._cancel_at(request.owner, request.id, request.epoch)

    async def _encode(self, request: Request) -> None:
        """Have its images encoded, before a replica is chosen: no reservation waits for them. Raises BusError."""
        wanted = request.to_encode()
        if not wanted or request.end is not None:
            return
        self._encoding.add(request.id)
        try:
            request.were_encoded(await self._vision.encode(wanted, lambda: request.end is not None))
        finally:
            self._encoding.discard(request.id)

    async def _dispatch(self, request: Request, routed: Routed) -> bool:
        """Give the request to a replica. Whether it took it; raises BusError when none ever can."""
        await self._encode(request)
        if request.end is not None:
            return False
        prompt = await self._bulk.wrap(request.prompt)
        epoch = request.dispatch(routed.replica, self.now_s())
        dispatch = Dispatch(
            request_id=request.id,
            entrypoint=self.id,
            epoch=epoch,
            reservation=routed.reservation,
            balancer=routed.balancer,
            prompt=prompt,
            num_prompt_tokens=request.submit.num_prompt_tokens,
            sampling=request.submit.sampling,
            limits=request.submit.limits,
            images=request.embeddings(),
            exact=request.submit.exact,
        )
        try:
            answer = await self.bus.ask(DISPATCH.at(routed.replica), dispatch, timeout_s=DISPATCH_S)
            if not isinstance(answer, Refused):
                request.dispatched(self.now_s())
                return True
            if answer.is_final:
                raise fail(Code.CONTEXT_LENGTH, answer.reason)
        except BusError as error:
            if error.code is Code.CONTEXT_LENGTH:
                raise
            if request.epoch != epoch:
                return True  # claimed meanwhile: only the answer was lost
            if error.code is Code.TRANSFER_FAILED and request.encoded and not request.were_lost():
                raise fail(Code.VISION_ERROR, "the encoded images could not be moved to prefill") from None
            if error.code is Code.DEADLINE_EXCEEDED:
                self.spawn(self._cancel_at(Owner(Role.PREFILL, routed.replica), request.id, epoch))
        finally:
            if prompt.handle is not None:
                self._bulk.withdraw(prompt.handle)  # pulled, or of no use any more
        request.refused()
        return False

    # Ending

    def _end(self, request: Request, end: End) -> None:
        if request.id in self._encoding:  # we do not know by whom
            self.spawn(self._vision.cancel(request.id))
        if self.shard.finish(request, end, self.now_s()):
            self._outbox.add(request.submit.recipe, request.id, request.epoch, len(request.tokens), [], end)
            self._close_span(request)
            self.wake()

    def _lose(self, owner: Owner, why: str) -> None:
        self._strikes.pop(owner, None)
        for request in [request for request in self.shard.live() if request.owner == owner]:
            message = f"{owner.role} replica {owner.replica} was lost: {why}"
            self._end(request, Failed(failure=Failure(code=Code.WORKER_LOST, message=message)))

    async def _cancel(self, request: Request, envelope: Envelope) -> None:
        """Reach the owner, then acknowledge to whoever asked."""
        if request.owner is not None:
            await self._cancel_at(request.owner, request.id, request.epoch)
        await envelope.answer(CancelAcknowledged(request_id=request.id, was_running=True))

    async def _cancel_at(self, owner: Owner, request_id: str, epoch: int) -> None:
        subject = subjects.CANCEL_PREFILL if owner.role is Role.PREFILL else subjects.CANCEL_DECODE
        cancel = Cancel(request_id=request_id, epoch=epoch)
        await insist(self.bus, subject.at(owner.replica), cancel, timeout_s=ASK_S, tries=MAX_STRIKES)

    # Watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = self.now_s()
            for request in self.shard.overdue(self.bus.seams.clock_ns()):
                failure = Failure(code=Code.DEADLINE_EXCEEDED, message="the deadline of the request has passed")
                self._end(request, Failed(failure=failure))
                if request.owner is not None:
                    self.spawn(self._cancel_at(request.owner, request.id, request.epoch))
            for owner, requests in self.shard.silent(now_s).items():
                for request in requests:
                    request.heard_s = now_s  # asked now; not again before the next silence
                self.spawn(self._probe(owner, requests))
            self.shard.forget_old(now_s)

    async def _probe(self, owner: Owner, requests: list[Request]) -> None:
        """Ask an owner for what was missed of these requests; find out whether it still is there."""
        subject = subjects.RESEND_PREFILL if owner.role is Role.PREFILL else subjects.RESEND_DECODE
        resend = Resend(
            request_ids=[request.id for request in requests],
            first_indexes=[len(request.tokens) for request in requests],
            epochs=[request.epoch for request in requests],
        )
        try:
            emitted = await self.bus.ask(subject.at(owner.replica), resend, timeout_s=ASK_S)
        except BusError as error:
            self._strikes[owner] = self._strikes.get(owner, 0) + 1
            if error.code is Code.NO_RESPONDERS or self._strikes[owner] >= MAX_STRIKES:
                self._lose(owner, error.failure.message)
            return
        finally:
            self._repairing.difference_update(resend.request_ids)
        self._strikes.pop(owner, None)
        await self.bus.tell(TOKENS.at(self.id), emitted)

    # Small things

    def _close_span(self, request: Request) -> None:
        if (span := self._spans.pop(request.id, None)) is not None:
            end_span(span, len(request.tokens), request.end)

    def _abandon(self, recipe: str) -> None:
        """Nobody takes tokens for this recipe: its clients are gone with it."""
        for request in [request for request in self.shard.live() if request.submit.recipe == recipe]:
            self._end(request, Cancelled())
            if request.owner is not None:
                self.spawn(self._cancel_at(request.owner, request.id, request.epoch))


def _holder(source: str) -> Owner:
    """Who `source` of a TokensEmitted, `role/id`, is."""
    role, _, replica = source.partition("/")
    return Owner(Role(role), replica)
