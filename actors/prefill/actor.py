"""The prefill replica: computes prompts in batched, chunked steps and hands each over to a decode replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import structs
from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

from actors.prefill.batch import Batch, Job
from actors.rules.emission import Held, resend_answer
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import (
    CANCEL_PREFILL,
    DISPATCH,
    HAND_OVER,
    RELEASE_DECODE,
    RELEASE_PREFILL,
    RESEND_PREFILL,
    ROUTE_DECODE,
    TOKENS,
    Subject,
)
from kernels.engine import Engine
from schemas.failure import Code, Failure
from schemas.handover import Dispatch, Dispatched, HandOver, Refused
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, End, Failed, Resend, TokensEmitted
from schemas.routing import LoadReported, Release, Route, Routed

tracer = trace.get_tracer("shoal")

MAX_QUEUED = 1024
"""Requests here at most, waiting, computing or being handed over; more are refused."""

ROUTE_S = 5.0
HAND_OVER_S = 30.0
PATIENCE_S = 60.0
"""How long a computed request waits for room in decode."""

PAUSE_S = 0.1


class Prefill(Actor):
    """One task drives the engine, a step at a time; each finished prompt is handed over in a task of its own."""

    role = Role.PREFILL

    def __init__(self, id: str, bus: Bus, bulk: Bulk, engine: Engine) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._engine = engine
        self.batch = Batch()
        self._leaving: dict[str, tuple[Job, asyncio.Event]] = {}
        self._spans: dict[str, tuple[Span, Span]] = {}
        self._has_work = asyncio.Event()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {DISPATCH: self._on_dispatch, CANCEL_PREFILL: self._on_cancel, RESEND_PREFILL: self._on_resend}

    async def on_start(self) -> None:
        await self._engine.start()
        self.spawn(self._step_loop())

    async def on_stop(self) -> None:
        await self._engine.close()
        for spans in self._spans.values():
            for span in reversed(spans):
                span.end()

    def load(self) -> LoadReported:
        jobs = [*self.batch, *(job for job, _ in self._leaving.values())]
        return structs.replace(
            super().load(),
            num_running=sum(job.is_admitted for job in self.batch),
            num_waiting=sum(not job.is_admitted for job in self.batch),
            num_tokens=self.batch.num_tokens_left,
            capacity_requests=MAX_QUEUED,
            capacity_tokens=self._engine.info.max_tokens * self._engine.info.num_slots,
            reservations=[job.dispatch.reservation for job in jobs],
            detail={"handing_over": float(len(self._leaving))},
        )

    # From the entrypoint

    async def _on_dispatch(self, dispatch: Dispatch, envelope: Envelope) -> Dispatched | Refused | None:
        limit = self._engine.info.max_tokens
        if dispatch.num_prompt_tokens >= limit:
            reason = f"the prompt has {dispatch.num_prompt_tokens} tokens, the limit is {limit} with the answer"
            return Refused(reason=reason, is_final=True)
        if self.is_draining or len(self.batch) + len(self._leaving) >= MAX_QUEUED:
            return Refused(reason=f"prefill {self.id} takes no more requests now")
        if dispatch.prompt.handle is None:
            return self._queue(dispatch, dispatch.prompt.inline, envelope)
        self.spawn(self._pull_and_queue(dispatch, envelope))
        return None

    async def _pull_and_queue(self, dispatch: Dispatch, envelope: Envelope) -> None:
        try:
            await envelope.answer(self._queue(dispatch, await self._bulk.unwrap(dispatch.prompt), envelope))
        except BusError as error:
            await envelope.answer(error.failure)

    def _queue(self, dispatch: Dispatch, prompt: bytes, envelope: Envelope) -> Dispatched:
        tokens = np.frombuffer(prompt, dtype="<u4")
        if len(tokens) != dispatch.num_prompt_tokens:
            raise fail(Code.INTERNAL, f"{len(tokens)} prompt tokens came, {dispatch.num_prompt_tokens} were announced")
        known = self.batch.get(dispatch.request_id)
        if known is not None:
            if known.dispatch.epoch >= dispatch.epoch:
                return Dispatched()
            raise fail(Code.DUPLICATE_REQUEST, f"an earlier dispatch of {dispatch.request_id} is still being freed")
        self.batch.add(Job(dispatch, tokens))
        span = tracer.start_span("prefill", context=envelope.context)
        span.set_attribute("shoal.replica", self.id)
        self._spans[dispatch.request_id] = (span, self._child("prefill queue", span))
        self._has_work.set()
        return Dispatched()

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        job = self.batch.get(cancel.request_id)
        leaving = self._leaving.get(cancel.request_id)
        if job is not None:
            job.is_cancelled = True
            if not job.is_admitted:
                self._drop(job)
            self._has_work.set()
        if leaving is not None:
            leaving[0].is_cancelled = True
            leaving[1].set()
        was_running = job is not None or leaving is not None
        return CancelAcknowledged(request_id=cancel.request_id, was_running=was_running)

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        def find(request_id: str) -> Held | None:
            job = self.batch.get(request_id)
            if job is None and request_id in self._leaving:
                job = self._leaving[request_id][0]
            return None if job is None else (job.dispatch.epoch, [], None)

        return resend_answer(f"{self.role}/{self.id}", resend, find)

    # Computing

    async def _step_loop(self) -> None:
        """The only caller of the engine."""
        while True:
            await self._has_work.wait()
            for job in self.batch:
                if job.is_cancelled:
                    self._drop(job)
            if len(self._leaving) < self._engine.info.num_slots:
                for job in self.batch.admit(self._engine):
                    self._next_phase(job.id, "prefill compute")
            step = self.batch.next_step(self._engine.info.max_step_tokens)
            if not step:
                self._has_work.clear()
                continue
            await self._engine.prefill([chunk for _, chunk in step])
            for job, chunk in step:
                job.num_done += len(chunk.tokens)
                if job.num_left == 0 and not job.is_cancelled:
                    await self._finish(job)

    async def _finish(self, job: Job) -> None:
        """The prompt is computed: take its state out of the engine, and let it go on its way."""
        state = await self._engine.export(job.id)
        self._engine.free(job.id)
        self.batch.remove(job)
        cancelled = asyncio.Event()
        self._leaving[job.id] = (job, cancelled)
        self.spawn(self._hand_over(job, state, cancelled))

    def _drop(self, job: Job) -> None:
        """A cancelled job leaves. Only between steps, or before it was admitted."""
        if job.is_admitted:
            self._engine.free(job.id)
        self.batch.remove(job)
        self._close(job)

    def _close(self, job: Job) -> None:
        """Once for each job, however it ended."""
        for span in reversed(self._spans.pop(job.id, ())):
            span.end()
        if not self._is_stopped:
            release = Release(reservation=job.dispatch.reservation)
            self.spawn(self.bus.tell(RELEASE_PREFILL.at(job.dispatch.balancer), release))

    # Handing over

    async def _hand_over(self, job: Job, state: bytes, cancelled: asyncio.Event) -> None:
        """Find a decode replica that takes the state. A cancelled one goes on to the next answer, then stops: so no
        reservation and no offer is ever left behind."""
        span = self._next_phase(job.id, "hand over")
        span.set_attribute("shoal.state_bytes", len(state))
        with trace.use_span(span):
            try:
                await self._offer_until_taken(job, state, cancelled)
            except BusError as error:
                await self._fail(job, error.failure)
        self._leaving.pop(job.id, None)
        self._close(job)
        self._has_work.set()

    async def _offer_until_taken(self, job: Job, state: bytes, cancelled: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + PATIENCE_S
        excluded: list[str] = []
        while not job.is_cancelled:
            wanted = Route(
                request_id=job.id,
                num_new=job.dispatch.limits.max_tokens,
                num_cached=len(job.tokens),
                excluded=excluded,
            )
            try:
                routed = await self.bus.ask(ROUTE_DECODE.any(), wanted, timeout_s=ROUTE_S)
            except BusError:
                if loop.time() > give_up_s:
                    raise
                excluded = []
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(cancelled.wait(), PAUSE_S)
                continue
            if not job.is_cancelled and await self._offer(job, state, routed):
                return
            await self.bus.tell(RELEASE_DECODE.at(routed.balancer), Release(reservation=routed.reservation))
            excluded = [*excluded, routed.replica]

    async def _offer(self, job: Job, state: bytes, routed: Routed) -> bool:
        """Offer the state to one decode replica. True if it took it."""
        try:
            handle = self._bulk.offer(state, lease_s=HAND_OVER_S)
        except BusError:
            return False  # too much is on offer already
        offer = HandOver(
            request_id=job.id,
            entrypoint=job.dispatch.entrypoint,
            epoch=job.dispatch.epoch,
            reservation=routed.reservation,
            balancer=routed.balancer,
            state=handle,
            layout=self._engine.info.layout,
            num_tokens=len(job.tokens),
            sampling=job.dispatch.sampling,
            limits=job.dispatch.limits,
        )
        try:
            answer = await self.bus.ask(HAND_OVER.at(routed.replica), offer, timeout_s=HAND_OVER_S)
        except BusError:
            return False
        finally:
            self._bulk.withdraw(handle)
        if isinstance(answer, Refused) and answer.is_final:
            job.is_cancelled = True  # it has ended, or is owned elsewhere
        return not isinstance(answer, Refused)

    async def _fail(self, job: Job, failure: Failure) -> None:
        """Tell the entrypoint the end. Stale by then if a decode replica had claimed the request after all."""
        span = trace.get_current_span()
        span.set_attribute("error.type", failure.code)
        span.set_status(StatusCode.ERROR, failure.message)
        end: End = Failed(failure=failure)
        emitted = TokensEmitted(
            source=f"{self.role}/{self.id}",
            request_ids=[job.id],
            epochs=[job.dispatch.epoch],
            first_indexes=[0],
            counts=[0],
            tokens=[],
            ends=[(0, end)],
        )
        await self.bus.tell(TOKENS.at(job.dispatch.entrypoint), emitted)

    # Spans: one for the whole stay, one for the present phase

    def _child(self, name: str, parent: Span) -> Span:
        return tracer.start_span(name, context=trace.set_span_in_context(parent))

    def _next_phase(self, request_id: str, name: str) -> Span:
        stay, phase = self._spans[request_id]
        phase.end()
        phase = self._child(name, stay)
        self._spans[request_id] = (stay, phase)
        return phase
