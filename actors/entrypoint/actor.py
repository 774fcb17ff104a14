"""The entrypoint shard: owns its requests from submit to their one terminal event, and alone issues epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec import structs
from opentelemetry import trace
from opentelemetry.trace import Span

from actors.entrypoint.finder import Finder
from actors.entrypoint.owner import UNKNOWN, Life, Owner
from actors.entrypoint.request import MAX_LOSSES, MAX_RETURNS, OVERDUE, Request, end_by, failed
from actors.entrypoint.shard import News, Shard
from actors.rules.outbox import Outbox
from actors.rules.spans import end_span
from bus import subjects
from bus.actor import GRACE_S, LAST_S, Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.courier import Courier
from bus.holders import Holders
from bus.images import AnyVision
from bus.lookup import Lookups
from bus.place import place
from bus.subjects import DISPATCH, EXITED, LOAD, RELEASE_PREFILL, ROUTE_PREFILL, TOKENS, TOUCHED, Address, Subject
from schemas.cache import BlocksTouched, HitShortened
from schemas.experts import GroupBroken
from schemas.failure import Code, Failure
from schemas.handover import Claim, Claimed, ClaimRefused, Refused
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, Cancelled, End, Resend, Submit, Submitted, Taken, TokensEmitted
from schemas.routing import LoadReported, Release, ReportLoad, Routed

tracer = trace.get_tracer("shoal")

ROUTE_PATIENCE_S = 20.0
"""How long a request waits for a replica to appear or to have room: a worker restarts within this time."""

RESUMED_PATIENCE_S = 600.0
"""The same of one that has output already: it is to end early only by its deadline."""

DISPATCH_S = 10.0
"""Longer than a prefill replica may take to pull a long prompt."""

WATCH_S = 1.0


class Entrypoint(Actor):
    """See `shard.py` and `request.py` for the decisions; here is only who is asked and told."""

    role, last_s = Role.ENTRYPOINT, LAST_S

    def __init__(self, id: str, bus: Bus, bulk: Bulk) -> None:
        super().__init__(id, bus)
        self.shard = Shard(id, first_epoch=bus.seams.random.getrandbits(30) << 32)
        self._bulk, self._spans = bulk, dict[str, Span]()
        self._outbox = Outbox(f"{self.role}/{id}")
        self._courier = Courier(bus, subjects.RECIPE_TOKENS, self._outbox, self.wake, self._abandon)
        self._holders, self._repairing = Holders(bus), set[str]()
        self._lookups, self._vision = Lookups(bus), AnyVision(bus, bulk)
        self._finder = Finder(self._lookups, bus.seams, self.now_s, self.wake)

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {
            subjects.SUBMIT: self._on_submit,
            subjects.CANCEL: self._on_cancel,
            subjects.CLAIM: self._on_claim,
            subjects.TOKENS: self._on_tokens,
            subjects.RESEND: self._on_resend,
            subjects.SHORTENED: self._on_shortened,
        }

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        loads = {LOAD.at(role): self._on_load for role in (Role.PREFILL, Role.METADATA)}
        broken = {subjects.BROKEN.at(role): self._on_broken for role in (Role.PREFILL, Role.DECODE)}
        return {EXITED.all(): self._on_exited, **broken, **loads}

    async def on_start(self) -> None:
        for role in (Role.PREFILL, Role.METADATA):
            await self.bus.tell(subjects.report_load(role).all(), ReportLoad())
        self.spawn(self._watch())

    async def on_stop(self) -> None:
        await self._end_all()
        await self.flush()

    async def drain(self, grace_s: float = GRACE_S) -> None:
        await super().drain(grace_s)
        self.spawn(self._end_all(grace_s))

    async def _end_all(self, grace_s: float = 0.0) -> None:
        """Their recipes give them to another shard, if there is one."""
        await asyncio.sleep(grace_s)
        for request in list(self.shard.live()):
            self._end(request, failed(Failure(code=Code.SHUTTING_DOWN, message=f"entrypoint {self.id} stops")))

    @property
    def is_drained(self) -> bool:
        return not self.shard.num_live and self._outbox.is_idle(self.now_s())

    def load(self) -> LoadReported:
        return structs.replace(super().load(), num_running=self.shard.num_live, detail=self.shard.detail())

    async def flush(self) -> None:
        await self._courier.flush()
        if keys := self._finder.touched.take():
            await self.bus.tell(TOUCHED.at(self.role), BlocksTouched(keys=keys))

    # From recipe

    async def _on_submit(self, submit: Submit, envelope: Envelope) -> Submitted:
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"entrypoint {self.id} takes no new requests")
        if self.shard.holds(submit):
            return Submitted(shard=self.id)
        request = self.shard.submit(submit, self.now_s())
        if request is None:
            raise fail(Code.DUPLICATE_REQUEST, f"a request with the id {submit.request_id} is running")
        span = self._spans[request.id] = tracer.start_span("entrypoint", context=envelope.context)
        span.set_attributes({"shoal.request.id": request.id, "shoal.exact": submit.exact})
        span.set_attribute("gen_ai.usage.input_tokens", submit.num_prompt_tokens)
        self.spawn(self._place(request, span))
        return Submitted(shard=self.id)

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged | None:
        request = self.shard.get(cancel.request_id)
        if request is None or request.end is not None:
            return CancelAcknowledged(request_id=cancel.request_id, was_running=False)
        self._end(request, end_by(cancel.reason))
        self.spawn(self._cancel(request, envelope))
        return None

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        return self.shard.resend(resend)

    # From prefill and decode

    async def _on_claim(self, claim: Claim, envelope: Envelope) -> Claimed | ClaimRefused:
        request = self.shard.get(claim.request_id)
        if request is None:
            return ClaimRefused(reason=f"entrypoint {self.id} does not know this request")
        answer = request.claim(claim.from_epoch, claim.replica, self.now_s(), Life(claim.pid, claim.generation))
        self._let_go(request)
        return answer

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        try:
            source = Owner.of(emitted.source)
        except ValueError:
            raise fail(Code.BAD_REQUEST, f"tokens of {emitted.source!r}: the source is written role/id") from None
        news, gaps, strays, given_back, lost = self.shard.hear(emitted, self.now_s())
        for item in news:
            self._pass_on(item)
        for request in gaps:
            if request.id not in self._repairing:
                assert request.owner is not None  # a current epoch has an owner
                self._repairing.add(request.id)
                self.spawn(self._probe(request.owner, [request]))
        for request in given_back:
            self.spawn(self._place(request, self._spans[request.id]))
        for request in lost:
            self._rebuild(request, f"{emitted.source} does not hold it (any more)")
        for request_id, epoch in strays:
            self.spawn(self._holders.cancel(source, request_id, epoch))
        return Taken()

    async def _on_shortened(self, shortened: HitShortened, envelope: Envelope) -> Taken:
        request = self.shard.get(shortened.request_id)
        if request is not None and request.shortened(shortened):
            self.spawn(self._place(request, self._spans[request.id]))
        return Taken()

    async def _on_load(self, report: LoadReported, envelope: Envelope) -> None:
        if self._finder.peers.saw(report, self.now_s()):
            self.spawn(self._finder.describe(report.id))

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        for owner in [Owner(role, id) for role in (Role.PREFILL, Role.DECODE) for id in exited.ids(role)]:
            self._lose(owner, f"the process {exited.name} ended", Life(exited.pid))
        self._vision.on_exited(exited)
        self._finder.peers.exited(exited)

    async def _on_broken(self, broken: GroupBroken, envelope: Envelope) -> None:
        for id in broken.ranks:  # one that stands still would not say so itself
            self._lose(Owner(broken.role, id), f"its group broke: {broken.reason}", Life(0, broken.generation))

    # Placing

    async def _place(self, request: Request, span: Span) -> None:
        """Look up, route and dispatch until a prefill replica has the request, it ended, or patience did."""
        with trace.use_span(span):
            try:
                if not request.prompt:
                    request.was_read(await self._bulk.unwrap(request.submit.prompt))
                while request.must_be_placed():
                    if request.is_overdue(self.bus.seams.clock_ns()):
                        raise BusError(OVERDUE)
                    if request.num_returns > MAX_RETURNS:
                        raise fail(Code.INTERNAL, "prefill returned the request that it was given with all its images")
                    await self._finder.look_up(request)
                    await self._encode(request)  # before a replica is chosen: no reservation waits for images
                    await place(
                        *(self.bus, ROUTE_PREFILL, RELEASE_PREFILL, request.route()),
                        lambda routed: self._dispatch(request, routed),
                        patience_s=RESUMED_PATIENCE_S if request.tokens else ROUTE_PATIENCE_S,
                        is_over=lambda: request.end is not None,
                    )
            except BusError as error:
                self._end(request, request.failed_by(error.failure, self.bus.seams.clock_ns()))
        request.is_placing = False  # it may be returned from now on
        self._let_go(request)
        if request.end is not None:
            self._free(request)

    async def _encode(self, request: Request) -> None:
        """Have those of its images encoded that will be read. Raises BusError."""
        if not (wanted := request.to_encode()):
            return
        request.images.is_encoding = True
        try:
            encoded = await self._vision.encode(wanted, lambda: request.end is not None)
            request.images.were_encoded(wanted, encoded)
        finally:
            request.images.is_encoding = False

    def _let_go(self, request: Request) -> None:
        """Vision need not hold for it what is of no use any more."""
        if held := request.let_go():
            self.spawn(self._vision.release(held))

    async def _dispatch(self, request: Request, routed: Routed) -> bool:
        """Give the request to a replica. Whether it took it; raises BusError when none ever can."""
        await self._finder.refresh(request)
        await self._encode(request)  # seldom any: lost ones, or those behind a start that has moved
        prompt = await self._bulk.wrap(request.text)
        try:
            if request.end is not None:
                return False
            num_lost, epoch = request.num_lost, request.dispatch(routed.replica, self.now_s())
            dispatch = request.to_dispatch(self.id, routed, prompt)
            answer = await self.bus.ask(DISPATCH.at(routed.replica), dispatch, timeout_s=DISPATCH_S)
            if not isinstance(answer, Refused):
                if request.epoch == epoch:
                    request.dispatched(self.now_s(), Life(answer.pid, answer.generation))
                return True
            if answer.is_final:
                raise fail(Code.CONTEXT_LENGTH, answer.reason)
        except BusError as error:
            if error.code is Code.CONTEXT_LENGTH:
                raise
            if request.epoch != epoch:  # claimed or returned meanwhile: only the answer was lost
                if request.num_lost > num_lost:  # or the replica was, who would release it
                    await self.bus.tell(RELEASE_PREFILL.at(routed.balancer), Release(reservation=routed.reservation))
                return True
            if error.code is Code.TRANSFER_FAILED and dispatch.images and not request.images.were_lost():
                raise fail(Code.VISION_ERROR, "the encoded images could not be moved to prefill") from None
            if error.code is Code.DEADLINE_EXCEEDED:
                self.spawn(self._holders.cancel(Owner(Role.PREFILL, routed.replica), request.id, epoch))
        finally:
            if prompt.handle is not None:
                self._bulk.withdraw(prompt.handle)  # pulled, or of no use any more
        request.refused()
        return False

    # Ending

    def _end(self, request: Request, end: End) -> None:
        if not self.shard.finish(request, end, self.now_s()):
            return  # one that came after it may have its id
        if request.images.is_encoding:  # we do not know by whom
            self.spawn(self._vision.cancel(request.id))
        self._lookups.give_up(request.id)
        self._pass_on(News(request, len(request.tokens), [], end))
        self.wake()

    def _pass_on(self, news: News) -> None:
        request, first, tokens, end, logprobs = news
        cached = request.num_cached(first)
        self._outbox.add(request.submit.recipe, request.id, request.epoch, first, tokens, end, cached, logprobs)
        if end is not None:
            self._let_go(request)
            if (span := self._spans.pop(request.id, None)) is not None:
                span.set_attributes(request.attributes())
                end_span(span, len(request.tokens), end)

    def _lose(self, owner: Owner, why: str, gone: Life = UNKNOWN) -> None:
        """It is gone, with all it held in the life that is `gone`."""
        self._holders.forget(owner)
        for request in [one for one in self.shard.live() if one.owner == owner and one.life.ends_with(gone)]:
            self._rebuild(request, f"{owner.role} replica {owner.replica} was lost: {why}")

    def _rebuild(self, request: Request, why: str) -> None:
        """Its state is lost. It is computed anew, by whoever is there, unless that was so too often."""
        if not self.shard.lose(request):
            message = f"{MAX_LOSSES} replicas were lost that had the request, and it may be why; the last: {why}"
            self._end(request, failed(Failure(code=Code.WORKER_LOST, message=message)))
        elif self.shard.rebuild(request):
            self.spawn(self._place(request, self._spans[request.id]))

    async def _cancel(self, request: Request, envelope: Envelope) -> None:
        """Reach the owner, then acknowledge to whoever asked."""
        if request.owner is not None:
            await self._holders.cancel(request.owner, request.id, request.epoch)
        await envelope.answer(CancelAcknowledged(request_id=request.id, was_running=True))

    def _free(self, request: Request) -> None:
        """Whoever has it need not go on."""
        if request.owner is not None:
            self.spawn(self._holders.cancel(request.owner, request.id, request.epoch))

    # Watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = self.now_s()
            for request in self.shard.overdue(self.bus.seams.clock_ns()):
                self._end(request, failed(OVERDUE))
                self._free(request)
            for owner, requests in self.shard.silent(now_s).items():
                for request in requests:
                    request.heard_s = now_s  # asked now; not again before the next silence
                self.spawn(self._probe(owner, requests))
            self.shard.forget_old(now_s)

    async def _probe(self, owner: Owner, requests: list[Request]) -> None:
        """Ask an owner for what was missed of these requests; find out whether it still is there."""
        resend = self.shard.missed(requests)
        try:
            emitted = await self._holders.ask_after(owner, resend)
        except BusError as error:
            for request in requests:
                if request.owner == owner:  # it may only be slow, and is not to go on with what others will have
                    self._free(request)
            self._lose(owner, error.failure.message)
            return
        finally:
            self._repairing.difference_update(resend.request_ids)
        if emitted is not None:
            await self.bus.tell(TOKENS.at(self.id), emitted)

    def _abandon(self, recipe: str) -> None:
        """Nobody takes tokens for this recipe: its clients are gone with it."""
        for request in [request for request in self.shard.live() if request.submit.recipe == recipe]:
            self._end(request, Cancelled())
            self._free(request)
