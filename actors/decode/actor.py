"""The decode replica: takes over computed requests and generates for all of them in one batch, step by step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs
from opentelemetry import trace
from opentelemetry.trace import Span

from actors.decode.blocks import Filling
from actors.decode.grammar import Grammars
from actors.decode.pressure import relieve
from actors.decode.slots import Generation, Said, Slots
from actors.rules.outbox import Outbox
from actors.rules.ring import Ring
from actors.rules.spans import end_span
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus
from bus.claiming import take_over
from bus.courier import Courier
from bus.keeper import Keeper
from bus.ranks import GroupOf, Ranks
from bus.snapshots import POOL_BYTES
from bus.subjects import CANCEL_DECODE, HAND_OVER, RELEASE_DECODE, RESEND_DECODE, TOKENS, Address, Subject
from kernels.engine import Admission, Engine, StateError
from schemas.failure import Code, Failure
from schemas.handover import Claimed, HandedOver, HandOver, Refused
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, Cancelled, Failed, Preempted, Resend, TokensEmitted
from schemas.routing import LoadReported, Release

log = logging.getLogger("shoal.decode")
tracer = trace.get_tracer("shoal")

PAUSE_S = 0.5
"""How long to wait at most for one of the entrypoints when all are behind."""

REPORT_S = 0.1
"""Between two reports of who came and went."""


class Decode(Actor):
    """One task drives the engine: between steps requests arrive and leave, at each step all running ones advance.

    What fills up of their blocks is read between steps and stored in the background; the windows at the ends of the
    last two are kept when a request ends. In a `group` it steps with the other ranks, also when it has no requests.
    """

    role = Role.DECODE

    def __init__(
        self,
        id: str,
        bus: Bus,
        bulk: Bulk,
        engine: Engine,
        snapshot_bytes: int = POOL_BYTES,
        group: GroupOf | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._engine = engine
        info = engine.info
        self._grammars = Grammars(tokenizer, info.vocab_size, info.eos_token)
        self.slots = Slots(info.num_slots, info.capacity_tokens, info.max_tokens)
        self._arrivals: list[tuple[Generation, bytes, asyncio.Future[str]]] = []
        self._outbox = Outbox(f"{self.role}/{id}")
        self._said: list[Said] = []
        self._courier = Courier(bus, TOKENS, self._outbox, self.wake, self._abandon)
        self.keeper = Keeper(bus, bulk, f"{self.role}/{id}", Ring, self.spawn, snapshot_bytes)
        self._spans: dict[str, Span] = {}
        self._num_preempted = self._num_waiting = 0
        self._num_rows = self._num_new = 0  # requests in all steps, and the tokens they got
        self._has_work = asyncio.Event()
        self._ranks = Ranks(bus, self.role, id, group, self.spawn, self._on_called)
        self._has_sent = asyncio.Event()
        self._has_changed = asyncio.Event()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {
            HAND_OVER: self._on_hand_over,
            CANCEL_DECODE: self._on_cancel,
            RESEND_DECODE: self._on_resend,
            **self._ranks.handlers(),
        }

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return self._ranks.events(self.keeper.events())

    async def on_start(self) -> None:
        await self._ranks.start(self._engine)
        await self.keeper.start()
        self.spawn(self._step_loop())
        self.spawn(self.report_changes(self._has_changed, REPORT_S))

    async def on_stop(self) -> None:
        self.keeper.close()
        await self._engine.close()
        for span in self._spans.values():
            span.end()

    def load(self) -> LoadReported:
        info = self._engine.info
        detail = {**self.keeper.detail(), "snapshots": float(len(self.keeper.snapshots))}
        detail |= self.slots.load().detail()
        detail |= {"preempted": float(self._num_preempted), "waiting_for_room": float(self._num_waiting)}
        if self._num_rows:
            detail["accepted_length"] = round(self._num_new / self._num_rows, 2)
            detail["verified_per_token"] = round(self._engine.counts.verified / max(self._num_new, 1), 2)
        return structs.replace(
            super().load(),
            num_running=len(self.slots.running()),
            num_waiting=len(self.slots) - len(self.slots.running()),
            num_tokens=self.slots.num_tokens,
            capacity_requests=info.num_slots,
            capacity_tokens=info.capacity_tokens,
            reservations=[generation.offer.reservation for generation in self.slots],
            detail=detail,
        )

    async def flush(self) -> None:
        if await self._courier.flush():
            self._has_sent.set()

    # Arriving

    async def _on_hand_over(self, offer: HandOver, envelope: Envelope) -> Refused | None:
        info = self._engine.info
        if offer.layout != info.layout:
            return Refused(reason=f"the state has layout {offer.layout}, decode {self.id} understands {info.layout}")
        generation = None if self.is_draining else self.slots.arrive(offer)
        if generation is None:
            return Refused(reason=f"decode {self.id} has no room, or holds this request already")
        self._has_changed.set()
        generation.filling = Filling.of(offer, info)
        span = tracer.start_span("decode", context=envelope.context)
        span.set_attribute("shoal.replica", self.id)
        self._spans[offer.request_id] = span
        self.spawn(self._take(generation, envelope, span))
        return None

    async def _take(self, generation: Generation, envelope: Envelope, span: Span) -> None:
        """Pull the state, put it into the engine, claim the request; answer the source either way."""
        offer, prepare = generation.offer, functools.partial(self._prepare, generation)
        with trace.use_span(span):
            answer = await take_over(self.bus, self._bulk, offer, self.id, prepare)
        if isinstance(answer, Claimed):
            generation.epoch = answer.epoch
        else:
            generation.end = Cancelled()
        self._on_called()
        await envelope.answer(HandedOver() if isinstance(answer, Claimed) else answer)

    async def _prepare(self, generation: Generation, state: bytes, output: list[int]) -> str:
        """Have it put into the engine, with its grammar behind the output so far. Why it cannot be, if it cannot."""
        if grammar := generation.offer.sampling.grammar:
            start = functools.partial(self._grammars.follow, grammar, output)
            generation.grammar = await self.bus.seams.run_beside(start)
        restored: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._arrivals.append((generation, state, restored))
        self._has_work.set()
        return await restored

    async def _restore_arrivals(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for generation, state, restored in arrivals:
            if generation.end is not None:
                restored.set_result("the request was cancelled")
                continue
            num_tokens = generation.num_reserved
            if self._engine.admit(generation.id, num_tokens, generation.sampling) is not Admission.OK:
                restored.set_result(f"decode {self.id} has no room for {num_tokens} tokens")
                continue
            generation.is_in_engine = True
            try:
                await self._engine.restore(generation.id, state)
                if generation.grammar is not None:
                    self._engine.constrain(generation.id, generation.grammar)
                restored.set_result("")
            except StateError as error:
                restored.set_result(str(error))

    # Leaving

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        was_running = self.slots.cancel(cancel.request_id, cancel.epoch)
        self._on_called()
        return CancelAcknowledged(request_id=cancel.request_id, was_running=was_running)

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        return self.slots.resend(f"{self.role}/{self.id}", resend)

    async def _let_go(self, generation: Generation) -> None:
        """Free what an ended request holds here. Only between steps."""
        if generation.is_in_engine:
            if generation.filling is not None:
                filling = generation.filling
                await self.keeper.keep_windows(self._engine, generation.id, filling, filling.windows())
            generation.is_in_engine = False
            self._engine.free(generation.id)
        self.keeper.forget(generation.id)
        self.slots.leave(generation, self.now_s())
        self._has_changed.set()
        if (span := self._spans.pop(generation.id, None)) is not None:
            end_span(span, generation.num_output, generation.end)
        release = Release(reservation=generation.offer.reservation)
        await self.bus.tell(RELEASE_DECODE.at(generation.offer.balancer), release)

    # Generating

    async def _step_loop(self) -> None:
        """The only caller of the engine."""
        while True:
            await self._has_work.wait()
            for generation in self.slots:
                if generation.end is not None:
                    await self._let_go(generation)
            waiting = await self._make_room()
            await self._restore_arrivals()
            running = self.slots.running()
            batch = [g for g in running if not self._outbox.is_backlogged(g.offer.entrypoint) and g not in waiting]
            if batch or self._ranks.is_called():
                await self._step(batch)
            elif running:
                self._has_sent.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_sent.wait(), PAUSE_S)
            elif not self._arrivals and all(g.end is None for g in self.slots):
                self._has_work.clear()
            self.wake()  # the mailbox loop is the only sender: two would mix up the order

    async def _make_room(self) -> list[Generation]:
        """Room for the next step of those that run (`pressure.py`). Those that have to wait for theirs."""
        info = self._engine.info
        relief = relieve(list(self.slots), self.slots.num_free_blocks, info.max_tokens)
        self._num_waiting = len(relief.waiting)
        for generation in relief.turned_away:
            generation.end = Cancelled()
        for generation in relief.preempted:
            generation.end = Preempted()
            log.warning(
                "decode %s: no room is left, and %s makes way, the youngest of %d, with %d tokens of output",
                *(self.id, generation.id, len(self.slots.running()) + 1, generation.num_output),
            )
        for generation, num_tokens in relief.grown:
            generation.num_reserved = num_tokens  # before anything can come in between
        for generation in relief.turned_away + relief.preempted:
            await self._let_go(generation)
        if relief.preempted:
            self._speak()
        for generation in relief.preempted:  # when its windows are kept, so that they are found
            self._num_preempted += 1
            first, epoch = generation.num_output, generation.epoch
            self._outbox.add(generation.offer.entrypoint, generation.id, epoch, first, [], generation.end)
        for generation, num_tokens in relief.grown:
            if not self._engine.grow(generation.id, num_tokens):
                raise RuntimeError(f"decode {self.id} counts more room than its engine has")
        return relief.waiting

    def _on_called(self) -> None:
        self._has_work.set()
        self._has_sent.set()  # the step loop may wait for that

    async def _step(self, batch: list[Generation]) -> None:
        info = self._engine.info
        try:
            new = await self._ranks.step(self._engine.decode([generation.id for generation in batch]))
        except ValueError:
            log.exception("decode %s: a step of %d requests failed", self.id, len(batch))
            self._fail(batch)
            return
        self._num_rows += len(batch)
        self._num_new += sum(map(len, new))
        for generation, tokens in zip(batch, new, strict=True):
            if generation.end is not None:
                continue  # cancelled while the step was running
            if not tokens:
                self._fail([generation])
                continue
            first = generation.num_output
            emitted = generation.advance(tokens, info.eos_token, info.max_tokens)
            logprobs = None
            if generation.logprobs is not None:
                logprobs = generation.told(self._engine.logprobs(generation.id), len(emitted))
            self._said.append(Said(generation, first, emitted, generation.end, logprobs))
        # Who goes on is all that the next step has to know: the rest is done while it runs.
        asyncio.get_running_loop().call_soon(self._speak)
        for generation in batch:
            filling = generation.filling
            if filling is not None and filling.take(generation.tokens, generation.num_computed):
                await self._keep_blocks(generation, filling)

    def _speak(self) -> None:
        """What steps gave goes into the outbox, in their order."""
        said, self._said = self._said, []
        for generation, first, tokens, end, logprobs in said:
            offer = generation.offer
            self._outbox.add(
                offer.entrypoint, offer.request_id, generation.epoch, first, tokens, end, logprobs=logprobs
            )
        self.wake()

    async def _keep_blocks(self, generation: Generation, filling: Filling) -> None:
        """Have the blocks stored that filled in the last step."""
        try:
            await self.keeper.keep_blocks(self._engine, generation.id, filling, filling.num_done)
        except ValueError:
            log.exception("decode %s: the blocks of a request cannot be read", self.id)
            generation.filling = None

    def _fail(self, batch: list[Generation]) -> None:
        """A step of these failed: what the engine holds of them is good for nothing."""
        self._speak()
        for generation in batch:
            generation.filling = None
            if generation.end is None:
                why = generation.trouble or f"decode {self.id} could not go on with the request, or one beside it"
                generation.end = Failed(failure=Failure(code=Code.INTERNAL, message=why))
                first, epoch = generation.num_output, generation.epoch
                self._outbox.add(generation.offer.entrypoint, generation.id, epoch, first, [], generation.end)

    # Small things

    def _abandon(self, entrypoint: str) -> None:
        """Nobody takes tokens for this entrypoint: its requests are gone with it."""
        for generation in self.slots:
            if generation.offer.entrypoint == entrypoint:
                self.slots.cancel(generation.id)
        self._has_work.set()
