"""The prefill replica: computes prompts in batched, chunked steps and hands each over to a decode replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import structs
from opentelemetry import trace

from actors.prefill.batch import Batch
from actors.prefill.computing import compute, measure
from actors.prefill.disk import LOAD_BYTES, Loader, pull
from actors.prefill.job import Job, Loading
from actors.prefill.jobs import MAX_QUEUED, Jobs
from actors.prefill.phases import Phases, note_failure
from actors.prefill.restore import NOTHING
from actors.rules.cost import Terms
from actors.rules.emission import resend_answer
from actors.rules.meter import Meter
from actors.rules.ring import Ring
from bus.actor import GRACE_S, LAST_S, Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.files import Files
from bus.keeper import Keeper
from bus.meeting import GroupOf
from bus.offering import PATIENCE_S, RESUMED_PATIENCE_S, Offering
from bus.ranks import Ranks
from bus.snapshots import POOL_BYTES
from bus.subjects import CANCEL_PREFILL, DESCRIBE, DISPATCH, RELEASE_PREFILL, RESEND_PREFILL, TOKENS, Address, Subject
from kernels.engine import Chunk, Engine
from kernels.grouping import GroupError, Regrouping
from schemas.cache import DescribeSpace, SpaceDescribed
from schemas.failure import Code, Failure
from schemas.handover import Dispatch, Dispatched, Refused
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, Failed, Resend, TokensEmitted
from schemas.routing import LoadReported, Release

log = logging.getLogger("shoal.prefill")

REPORT_S = 0.5
"""Between two load reports of a replica where something changes; the balancer knows what it sent meanwhile itself."""


class Prefill(Actor):
    """One task drives the engine, a step at a time; the cached beginning of each prompt is loaded, and each finished
    prompt handed over, in a task of its own. What was computed is stored, and windows kept, in the background."""

    role, last_s = Role.PREFILL, LAST_S

    def __init__(
        self,
        id: str,
        bus: Bus,
        bulk: Bulk,
        engine: Engine,
        files: Files,
        snapshot_bytes: int = POOL_BYTES,
        group: GroupOf | None = None,
    ) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._engine = engine
        self.batch = Batch(Meter())
        self.keeper = Keeper(bus, bulk, f"{self.role}/{id}", Ring, self.spawn, snapshot_bytes)
        self.loader = Loader(bus, files, self.keeper.snapshots, self.spawn, self._on_loaded, self.report_load)
        self.jobs = Jobs(self.batch)
        self._phases = Phases(id)
        self._has_work, self._has_changed = asyncio.Event(), asyncio.Event()
        self._ranks = Ranks(bus, self.role, id, group, self.spawn, self._has_work.set)

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        own: dict[Subject[Any, Any], Handler] = {DISPATCH: self._on_dispatch, DESCRIBE: self._on_describe}
        return {**own, CANCEL_PREFILL: self._on_cancel, RESEND_PREFILL: self._on_resend, **self._ranks.handlers()}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return self._ranks.events(self.keeper.events())

    async def on_start(self) -> None:
        await self._ranks.start(self._engine)
        await measure(self._engine, self.batch.meter, self._ranks.step)
        self._has_work.set()  # in a group: to fall asleep together
        await self.keeper.start()
        self.spawn(self._step_loop())
        self.spawn(self.report_changes(self._has_changed, REPORT_S))

    async def on_stop(self) -> None:
        self.keeper.close()
        await self._engine.close()
        await self.loader.close()
        self._phases.end_all()

    def load(self) -> LoadReported:
        detail = self.batch.detail(self.now_s()) | self.loader.detail() | self.keeper.detail() | self._ranks.detail()
        return structs.replace(
            super().load(),
            num_running=self.batch.num_running,
            num_waiting=len(self.batch) - self.batch.num_running,
            num_tokens=self.batch.num_tokens_left,
            capacity_requests=MAX_QUEUED,
            capacity_tokens=self._engine.info.capacity_tokens,
            reservations=[job.dispatch.reservation for job in self.jobs],
            detail={"handing_over": float(len(self.jobs.leaving)), **detail},
        )

    # Leaving

    async def drain(self, grace_s: float = GRACE_S) -> None:
        """What is begun goes on until it is handed over or the grace is over; the rest is given back at once."""
        await super().drain(grace_s)
        self.jobs.pulling.clear()
        self._give_back([job for job in self.batch if not job.is_admitted])
        self.spawn(self._see_off(grace_s))

    @property
    def is_drained(self) -> bool:
        return not len(self.jobs) and not self.loader.returning and self.keeper.is_idle

    async def _see_off(self, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        self._give_back(list(self.jobs))

    def _give_back(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.is_given_back = True
            self._end(job)

    # From the entrypoint

    async def _on_dispatch(self, dispatch: Dispatch, envelope: Envelope) -> Dispatched | Refused | None:
        max_tokens = self._engine.info.max_tokens
        if refused := self.jobs.refuse(dispatch, self.id, max_tokens, is_draining=self.is_draining):
            return refused
        if dispatch.prompt.handle is None and not dispatch.images:
            return self._queue(dispatch, dispatch.prompt.inline, [], envelope)
        self.jobs.pulling[dispatch.request_id] = dispatch  # now: a cancel may be right behind
        self.spawn(self._pull_and_queue(dispatch, envelope))
        return None

    async def _pull_and_queue(self, dispatch: Dispatch, envelope: Envelope) -> None:
        """A long prompt comes by handle, as images do. Meanwhile it can be asked after, and cancelled."""
        try:
            prompt, rows = await pull(self._bulk, dispatch)
            if self.jobs.pulling.get(dispatch.request_id) is not dispatch:
                raise fail(Code.CANCELLED, "the request was cancelled")
            await envelope.answer(self._queue(dispatch, prompt, rows, envelope))
        except BusError as error:
            await envelope.answer(error.failure)
        finally:
            if self.jobs.pulling.get(dispatch.request_id) is dispatch:
                del self.jobs.pulling[dispatch.request_id]

    def _queue(self, dispatch: Dispatch, prompt: bytes, rows: list[bytes], envelope: Envelope) -> Dispatched:
        info, branches = self._engine.info, dispatch.branches if self.keeper.is_of_use() else []
        try:
            job = Job.of(dispatch, prompt, rows, space=info.space, block_bytes=info.block_bytes, branches=branches)
        except ValueError as error:
            raise fail(Code.INTERNAL, str(error)) from None
        known = self.jobs.get(dispatch.request_id)
        if known is not None:
            if known.dispatch.epoch == dispatch.epoch:  # said again
                return Dispatched(pid=self.bus.seams.pid, generation=self._ranks.generation)
            raise fail(Code.DUPLICATE_REQUEST, f"an earlier dispatch of {dispatch.request_id} is still being freed")
        job.arrived_s = self.now_s()
        if job.loading is Loading.NONE:
            self.loader.settle(job, NOTHING, "an exact request, or blocks of another space")
        self.batch.add(job)
        self._phases.begin(job.id, envelope.context, "prefill queue")
        if job.is_returned:
            self._drop(job)
        self._load_more()
        self._has_work.set()
        return Dispatched(pid=self.bus.seams.pid, generation=self._ranks.generation)

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        was_running, job = self.jobs.cancel(cancel)
        if job is not None:
            self._end(job)
        return CancelAcknowledged(request_id=cancel.request_id, was_running=was_running)

    def _end(self, job: Job) -> None:
        """Nobody waits for it here: it leaves, now or between two steps."""
        if job.id in self.jobs.leaving:
            self.jobs.leaving[job.id][1].cancel()
            self.loader.stop(job)
        elif not job.is_admitted:
            self._drop(job)
        self._has_work.set()

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        return resend_answer(f"{self.role}/{self.id}", resend, partial(self.jobs.held, self.loader.returning))

    async def _on_describe(self, describe: DescribeSpace, envelope: Envelope) -> SpaceDescribed:
        return SpaceDescribed(space=self._engine.info.space)

    # Computing

    def _load_more(self) -> None:
        for job in self.batch.to_load(LOAD_BYTES):
            self._phases.next(job.id, "load prefix")
            self.loader.begin(job, self._engine.info)

    def _on_loaded(self, job: Job) -> None:
        if job.is_returned:
            self._drop(job)
        else:
            self._phases.next(job.id, "prefill queue")
            self.batch.loaded(job)
        self._load_more()
        self._has_work.set()

    async def _step_loop(self) -> None:
        """The only caller of the engine."""
        while True:
            await self._ranks.turn(self._has_work)
            if not self._ranks.is_called():
                self._has_work.clear()
            now_ns = self.bus.seams.clock_ns()
            for job in self.batch:
                if job.is_over(now_ns):
                    self._drop(job)
            await self._admit()
            step = self.batch.next_step(self._engine.info.max_step_tokens)
            self._has_changed.set()
            if step:
                self._has_work.set()  # there may be more
            if step or self._ranks.is_called():
                await self._compute(step)

    async def _admit(self) -> None:
        admitted, hopeless = self.batch.admit(self._engine, len(self.jobs.leaving))
        for job in admitted:
            self._phases.next(job.id, "prefill compute")
            try:
                if job.images:
                    self._engine.attach(job.id, job.images)
            except ValueError as error:
                await self._reject(job, Failure(code=Code.VISION_ERROR, message=str(error)))
            else:
                await self._resume(job)
        for job in hopeless:
            why = f"{len(job.tokens)} prompt tokens do not fit into prefill {self.id}"
            await self._reject(job, Failure(code=Code.CONTEXT_LENGTH, message=why))
        self._load_more()

    async def _resume(self, job: Job) -> None:
        """Give the engine what was loaded for a job, and note how long that takes."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self.loader.resume(job, self._engine)
        self.batch.meter.add(Terms(steps=0, blocks=job.restored.hit.num_blocks), (clock() - began_s) * 1e9)
        if job.is_returned:
            self._drop(job)

    async def _compute(self, step: Sequence[tuple[Job, Chunk]]) -> None:
        try:
            await self._ranks.step(compute(self._engine, self.batch, step))
        except GroupError as error:  # a rank is gone, and with it the state of those in the step
            self._give_back([job for job, _ in step if not isinstance(error, Regrouping)])
            return
        except ValueError:
            log.exception("prefill %s: a step of %d requests failed", self.id, len(step))
            self._ranks.judge(is_good=False)
            why = f"prefill {self.id} could not compute the request, or one computed with it"
            for job, _ in step:
                await self._reject(job, Failure(code=Code.INTERNAL, message=why))
            return
        jobs = []
        for job, _ in step:
            if not job.is_over(0) and (job.num_left or await self._finish(job)):
                jobs.append(job)
        for job in jobs:  # now that all who are ready are on their way
            if (keeping := job.keeping) is not None:
                await self.keeper.keep_blocks(self._engine, job.id, keeping, job.num_done)
                await self.keeper.keep_windows(self._engine, job.id, keeping, keeping.windows(job.num_done))
            if job.num_left == 0:
                self.keeper.forget(job.id)
                self._engine.free(job.id)

    async def _finish(self, job: Job) -> bool:
        """The prompt is computed: send its state on its way. The engine has it. False if there is nothing to send."""
        try:
            state = await self._engine.export(job.id)
        except ValueError:
            log.exception("prefill %s: the state of a request cannot be exported", self.id)
            self._ranks.judge(is_good=False)
            await self._reject(job, Failure(code=Code.INTERNAL, message="the prompt cannot be computed"))
            return False
        self._ranks.judge(is_good=True)
        if job.is_over(0):
            return False
        self.batch.remove(job)
        job.images = []  # of no use any more, and large
        layout = self._engine.info.layout
        offering = Offering(self.bus, self._bulk, state, lambda to, handle: job.hand_over(to, handle, layout))
        self.jobs.leaving[job.id] = (job, offering)
        self.spawn(self._hand_over(job, state, offering))
        return True

    async def _reject(self, job: Job, failure: Failure) -> None:
        """A job that cannot be computed ends here. Only between steps."""
        await self._fail(job, failure)
        if self.batch.get(job.id) is job:  # one without a slot may have been cancelled meanwhile
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """A job that is not computed leaves. Only between steps, or before it was admitted."""
        if job.is_admitted:
            self._engine.free(job.id)
        self.keeper.forget(job.id)
        self.batch.remove(job)
        self._close(job)

    def _close(self, job: Job) -> None:
        """Once for each job, however it ended."""
        self._phases.end(job.id)
        self.loader.stop(job)
        if not self._is_stopped:
            release = Release(reservation=job.dispatch.reservation)
            self.spawn(self.bus.tell(RELEASE_PREFILL.at(job.dispatch.balancer), release))
        if job.is_given_back and not job.is_cancelled:
            self.loader.give_back(job, f"{self.role}/{self.id}")

    # Handing over

    async def _hand_over(self, job: Job, state: bytes, offering: Offering) -> None:
        """See the state off to a decode replica."""
        span = self._phases.next(job.id, "hand over")
        span.set_attribute("shoal.state_bytes", len(state))
        with trace.use_span(span):
            await self.loader.told(job)  # so that usage is right from the first token on
            try:
                patience_s = RESUMED_PATIENCE_S if job.dispatch.num_output else PATIENCE_S
                await offering.place(job.route(), patience_s)
            except BusError as error:
                await self._fail(job, error.failure)
        self.jobs.leaving.pop(job.id, None)
        self._close(job)
        self._has_work.set()

    async def _fail(self, job: Job, failure: Failure) -> None:
        """Tell the entrypoint the end. Stale by then if a decode replica had claimed the request after all."""
        note_failure(failure)
        ended = job.ended(f"{self.role}/{self.id}", Failed(failure=failure))
        await self.bus.tell(TOKENS.at(job.dispatch.entrypoint), ended)
