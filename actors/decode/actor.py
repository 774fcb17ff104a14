"""The decode replica: takes over computed requests and generates for all of them in one batch, step by step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

from msgspec import structs
from opentelemetry import trace

from actors.decode.blocks import Filling
from actors.decode.grammar import Grammars
from actors.decode.pressure import may_want, relieve
from actors.decode.slots import Generation, Slots
from actors.decode.telling import PACE_S, Telling, Totals
from actors.rules.ring import Ring
from actors.rules.spans import end_span
from bus.actor import GRACE_S, LAST_S, Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus
from bus.claiming import take_over
from bus.courier import Courier
from bus.keeper import Keeper
from bus.meeting import GroupOf
from bus.ranks import Ranks
from bus.snapshots import POOL_BYTES
from bus.subjects import CANCEL_DECODE, HAND_OVER, RELEASE_DECODE, RESEND_DECODE, TOKENS, Address, Subject
from bus.waiting import wait
from kernels.engine import Admission, Engine, StateError
from kernels.grouping import GroupError
from schemas.failure import Code, Failure
from schemas.handover import Claimed, HandedOver, HandOver, Refused
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, Cancelled, Failed, Preempted, Resend, TokensEmitted
from schemas.routing import LoadReported, Release
from supervisors.grace import Fate
from supervisors.leaving import Leaving

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
    At the end of its grace it has others go on with what it still has (`supervisors/leaving.py`).
    """

    role, last_s = Role.DECODE, LAST_S

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
        self._telling = Telling(f"{self.role}/{id}", self.wake)
        self._courier = Courier(bus, TOKENS, self._telling, self.wake, self._abandon, PACE_S)
        self.keeper = Keeper(bus, bulk, f"{self.role}/{id}", Ring, self.spawn, snapshot_bytes)
        self._leaving = Leaving(bus, bulk, self.spawn, self._on_called)
        self._totals = Totals()
        self._ranks = Ranks(bus, self.role, id, group, self.spawn, self._on_called)
        self._has_work, self._has_sent, self._has_changed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        own: dict[Subject[Any, Any], Handler] = {HAND_OVER: self._on_hand_over, CANCEL_DECODE: self._on_cancel}
        return {**own, RESEND_DECODE: self._on_resend, **self._ranks.handlers()}

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
        for span in [one.span for one in self.slots if one.span is not None]:
            span.end()

    def load(self) -> LoadReported:
        info = self._engine.info
        detail = {**self.keeper.detail(), "snapshots": float(len(self.keeper.snapshots))}
        detail |= self.slots.load().detail() | self._totals.detail(self._engine.counts.verified)
        detail |= self._leaving.detail() | self._ranks.detail()
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

    async def drain(self, grace_s: float = GRACE_S) -> None:
        self._leaving.drain(grace_s)
        await super().drain(grace_s)

    @property
    def is_drained(self) -> bool:
        return self._leaving.is_gone(len(self.slots)) and self._telling.is_idle(self.now_s()) and self.keeper.is_idle

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
        generation.span = tracer.start_span("decode", context=envelope.context)
        generation.span.set_attribute("shoal.replica", self.id)
        self.spawn(self._take(generation, envelope))
        return None

    async def _take(self, generation: Generation, envelope: Envelope) -> None:
        """Pull the state, put it into the engine, claim the request; answer the source either way."""
        offer, prepare = generation.offer, functools.partial(self._prepare, generation)
        span = generation.span or trace.INVALID_SPAN
        with trace.use_span(span):
            answer = await take_over(self.bus, self._bulk, offer, self.id, self._ranks.generation, prepare)
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

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        return self.slots.resend(f"{self.role}/{self.id}", resend)

    # Leaving

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        was_running = self._end(cancel.request_id, cancel.epoch)
        return CancelAcknowledged(request_id=cancel.request_id, was_running=was_running)

    def _end(self, request_id: str, epoch: int = 0) -> bool:
        """Nobody wants it any more. False if it is not here, or not held under so early an epoch."""
        if was_running := self.slots.cancel(request_id, epoch):
            self._leaving.cancel(request_id)
        self._on_called()
        return was_running

    async def _see_off(self) -> None:
        """Those whose turn it is to leave are taken out of the engine. Only between steps."""
        turn = self._leaving.turn([one.id for one in sorted(self.slots.running(), key=lambda g: g.offer.is_protected)])
        for generation in [one for one in self.slots if one.id in turn]:
            generation.is_leaving, state = True, b""
            with contextlib.suppress(ValueError):  # its numbers overflowed: it fails where it is computed anew
                if not self._leaving.is_late():
                    state = await self._engine.export(generation.id)
            self._engine.free(generation.id)
            generation.is_in_engine, generation.num_reserved = False, 0
            self.spawn(self._move(generation, state))

    async def _move(self, generation: Generation, state: bytes) -> None:
        """Another replica owns the request, or its entrypoint has it again: in any case it has ended here."""
        last = generation.hand_over(is_whole=not self.keeper.is_failed(generation.id))
        fate = await self._leaving.move(last, state if generation.end is None else b"")
        if generation.end is None:
            generation.end = Preempted()
            if fate is not Fate.MOVED:
                self._telling.last_word(generation)
        self._on_called()

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
        if generation.span is not None:
            end_span(generation.span, generation.num_output, generation.end)
        release = Release(reservation=generation.offer.reservation)
        await self.bus.tell(RELEASE_DECODE.at(generation.offer.balancer), release)

    # Generating

    async def _step_loop(self) -> None:
        """The only caller of the engine."""
        while True:
            await self._ranks.turn(self._has_work)
            for generation in self.slots.over():
                await self._let_go(generation)
            if self.is_draining:
                await self._see_off()
            waiting = await self._make_room()
            if self._arrivals:
                await self._restore_arrivals()
            running = self.slots.running()
            batch = [g for g in running if not self._telling.is_backlogged(g.offer.entrypoint) and g not in waiting]
            if batch or self._ranks.is_called():
                await self._step(batch)
            elif running:
                self._has_sent.clear()
                await wait(self._has_sent, PAUSE_S)
                self.wake()  # receipts may have been lost
            elif not self._arrivals and not self.slots.over():
                self._has_work.clear()

    async def _make_room(self) -> list[Generation]:
        """Room for the next step of those that run (`pressure.py`). Those that have to wait for theirs."""
        running, max_tokens = self.slots.running(), self._engine.info.max_tokens
        self._totals.num_waiting = 0
        if not any(map(may_want, running, repeat(max_tokens))):
            return []
        relief = relieve(list(self.slots), self.slots.num_free_blocks, max_tokens)
        self._totals.num_waiting = len(relief.waiting)
        for generation in relief.turned_away:
            generation.end = Cancelled()
        for generation in relief.preempted:
            generation.end = Preempted()
            log.warning(
                "decode %s: no room is left, and %s makes way, the youngest of %d, with %d tokens of output",
                *(self.id, generation.id, len(running), generation.num_output),
            )
        for generation, num_tokens in relief.grown:
            generation.num_reserved = num_tokens  # before anything can come in between
        self._totals.num_preempted += len(relief.preempted)
        for generation in relief.turned_away + relief.preempted:
            await self._let_go(generation)
        for generation in relief.preempted:  # when its windows are kept, so that they are found
            self._telling.last_word(generation)
        for generation, num_tokens in relief.grown:
            if not self._engine.grow(generation.id, num_tokens):
                raise RuntimeError(f"decode {self.id} counts more room than its engine has")
        return relief.waiting

    def _on_called(self) -> None:
        self._has_work.set()
        self._has_sent.set()  # the step loop may wait for that

    async def _step(self, batch: list[Generation]) -> None:
        try:
            new = await self._ranks.step(self._engine.decode([generation.id for generation in batch]))
        except GroupError:
            return  # those that are left have met again, and nothing is done
        except ValueError:
            log.exception("decode %s: a step of %d requests failed", self.id, len(batch))
            self._ranks.judge(is_good=False)
            self._fail(batch)
            return
        if batch:  # a step for other ranks says nothing of this one, nor does who cannot be kept to a grammar
            self._ranks.judge(is_good=any(tokens or one.trouble for one, tokens in zip(batch, new, strict=True)))
        self._totals.step(new)
        for generation, tokens in zip(batch, new, strict=True):
            if generation.end is None and tokens:
                self._telling.step(generation, tokens, self._engine)
            elif generation.end is None:  # else cancelled while the step was running
                self._fail([generation])
        # The mailbox loop is the only sender: two would mix up the order. It gets there while the next step runs.
        if self._telling.may_send(asyncio.get_running_loop().time()):
            self.wake()
        for generation in batch:
            if (filling := generation.filling) and filling.take(generation.tokens, generation.num_computed):
                await self._keep_blocks(generation, filling)

    async def _keep_blocks(self, generation: Generation, filling: Filling) -> None:
        """Have the blocks stored that filled in the last step."""
        try:
            await self.keeper.keep_blocks(self._engine, generation.id, filling, filling.num_done)
        except ValueError:
            log.exception("decode %s: the blocks of a request cannot be read", self.id)
            generation.filling = None

    def _fail(self, batch: list[Generation]) -> None:
        """A step of these failed: what the engine holds of them is good for nothing."""
        for generation in batch:
            generation.filling = None
            if generation.end is None:
                why = generation.trouble or f"decode {self.id} could not go on with the request, or one beside it"
                generation.end = Failed(failure=Failure(code=Code.INTERNAL, message=why))
                self._telling.last_word(generation)

    def _abandon(self, entrypoint: str) -> None:
        """Nobody takes tokens for this entrypoint: its requests are gone with it."""
        for generation in [one for one in self.slots if one.offer.entrypoint == entrypoint]:
            self._end(generation.id)
