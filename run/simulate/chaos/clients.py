"""All clients and the recipe in front of them, which nothing happens to: what each request is owed, and what came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.recipe.shards import Shards
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.entrypoints import ASK_TIMEOUT_S, cancel_at, offered, place
from bus.subjects import EXITED, LOAD, RECIPE_TOKENS, RESEND, Address, Subject, report_load
from run.simulate.chaos.script import Ask
from run.simulate.chaos.truth import Answer, prompt
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import (
    Cancelled,
    CancelReason,
    End,
    Failed,
    LastWord,
    Limits,
    Preempted,
    Resend,
    Sampling,
    Submit,
    Taken,
    TokenLogprobs,
    TokensEmitted,
)
from schemas.routing import LoadReported, ReportLoad

SILENCE_S = 5.0
WATCH_S = 1.0

Violate = Callable[[str, str], None]
"""A rule is broken: which, and how."""


@dataclass(slots=True, eq=False)
class Call:
    """One request as its client sees it. `is_ours`: the client ended it, or gave its shard up, without being told."""

    ask: Ask
    answer: Answer
    begun_s: float
    heard_s: float
    shard: str = ""
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    ended_s: float = 0.0
    is_ours: bool = False
    is_cancelled: bool = False
    is_resending: bool = False
    is_behind: bool = False
    is_judged: bool = False


class Clients(Actor):
    """What a recipe does with its requests, without a model's words for them."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus, bulk: Bulk, violate: Violate) -> None:
        super().__init__(id, bus)
        self._bulk, self._violate = bulk, violate
        self._shards = Shards()
        self.calls: dict[str, Call] = {}

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RECIPE_TOKENS: self._on_tokens}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {LOAD.at(Role.ENTRYPOINT): self._on_load, EXITED.all(): self._on_exited}

    async def on_start(self) -> None:
        await self.bus.tell(report_load(Role.ENTRYPOINT).all(), ReportLoad())
        self.spawn(self._watch())

    def open(self) -> list[Call]:
        """Those that have not ended."""
        return [call for call in self.calls.values() if call.end is None]

    # Asking

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """Send a request on its way; cancel it when its time has come."""
        now_s = self.now_s()
        call = self.calls[ask.id] = Call(ask, answer, begun_s=now_s, heard_s=now_s)
        try:
            async with offered(self._bulk, prompt(ask).tobytes()) as payload:
                submit = Submit(
                    request_id=ask.id,
                    recipe=self.id,
                    tenant=ask.tenant,
                    prompt=payload,
                    num_prompt_tokens=ask.num_tokens,
                    sampling=Sampling(
                        temperature=ask.temperature, top_p=1.0, seed=ask.seed, top_logprobs=ask.top_logprobs
                    ),
                    limits=Limits(
                        max_tokens=ask.max_tokens,
                        deadline_ns=int((now_s + ask.deadline_s) * 1e9) if ask.deadline_s else 0,
                    ),
                    exact=ask.is_exact,
                )
                call.shard = await place(
                    self.bus,
                    submit,
                    lambda tried: self._shards.owner(ask.id, tried, self.now_s()),
                    lambda: call.is_cancelled,
                    lambda: call.shard,
                )
        except BusError as error:
            self._close(call, Failed(failure=error.failure), is_ours=True)
        if call.is_cancelled and call.shard:
            await cancel_at(self.bus, call.shard, ask.id, CancelReason.CLIENT)

    async def cancel(self, id: str) -> None:
        """Its client wants it no more."""
        call = self.calls[id]
        if call.end is None:
            call.is_cancelled = True
            self._close(call, Cancelled(), is_ours=True)
            if call.shard:
                await cancel_at(self.bus, call.shard, id, CancelReason.CLIENT)

    # Hearing

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        self._apply(emitted)
        return Taken()

    def _apply(self, emitted: TokensEmitted) -> None:
        ends, said, start = dict(emitted.ends), dict(emitted.logprobs), 0
        shard = emitted.source.rpartition("/")[2]
        for i, id in enumerate(emitted.request_ids):
            tokens = emitted.tokens[start : start + emitted.counts[i]]
            start += emitted.counts[i]
            call = self.calls[id]
            if call.end is None:
                call.shard = call.shard or shard  # tokens may overtake the answer to Submit
                self._hear(call, emitted.first_indexes[i], tokens, ends.get(i), said.get(i))
            else:
                self._hear_late(call, shard, emitted.first_indexes[i], tokens, ends.get(i))

    def _hear(
        self, call: Call, first: int, tokens: list[int], end: LastWord | None, logprobs: TokenLogprobs | None
    ) -> None:
        call.heard_s = self.now_s()
        known = len(call.tokens) - first
        if known < 0:
            call.is_behind = True
            if not call.is_resending:
                self._ask_after([call])
            return
        self._check(call, first, tokens)
        if logprobs is not None and logprobs.sampled != call.answer.logprobs[first : first + len(tokens)]:
            self._violate("logprobs", f"{call.ask.id}: those of tokens from {first} on are not theirs")
        call.tokens += tokens[known:]
        if isinstance(end, Preempted):
            self._violate("ends", f"{call.ask.id}: its client is told that it made way")
        elif end is not None:
            self._close(call, end)

    def _hear_late(self, call: Call, shard: str, first: int, tokens: list[int], end: LastWord | None) -> None:
        """Something after the end: nothing new may be in it, unless it was ended here."""
        self._check(call, first, tokens)
        if call.is_ours:
            if end is None:
                self.spawn(cancel_at(self.bus, shard, call.ask.id, CancelReason.CLIENT_GONE))
            return
        if first + len(tokens) > len(call.tokens):
            self._violate("ends", f"{call.ask.id}: tokens after the end, from {first} on")
        if end is not None and end != call.end:
            lost = isinstance(end, Failed) and end.failure.code is Code.WORKER_LOST  # asked after, long after its end
            if not lost:
                self._violate("ends", f"{call.ask.id}: ended by {call.end}, then by {end}")

    def _check(self, call: Call, first: int, tokens: list[int]) -> None:
        owed = call.answer.tokens[first : first + len(tokens)]
        if tokens != owed:
            at = next((n for n, (a, b) in enumerate(zip(tokens, owed, strict=False)) if a != b), len(owed))
            self._violate("tokens", f"{call.ask.id}: token {first + at} is not the one of the undisturbed answer")

    def _close(self, call: Call, end: End, *, is_ours: bool = False) -> None:
        if call.end is None:
            call.end, call.ended_s, call.is_ours = end, self.now_s(), is_ours

    # Watching

    async def _on_load(self, report: LoadReported, envelope: Envelope) -> None:
        if self._shards.saw(report, self.now_s()):
            self._ask_after([call for call in self.open() if call.shard == report.id])

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        for shard in exited.ids(Role.ENTRYPOINT):
            self._lose(shard)

    def _lose(self, shard: str) -> None:
        self._shards.forget(shard)
        failure = Failure(code=Code.WORKER_LOST, message=f"the entrypoint {shard} that held the request was lost")
        for call in [call for call in self.open() if call.shard == shard]:
            self._close(call, Failed(failure=failure), is_ours=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            silent = [c for c in self.open() if c.shard and not c.is_resending and self._is_silent(c)]
            self._ask_after(silent)

    def _is_silent(self, call: Call) -> bool:
        return call.is_behind or self.now_s() - call.heard_s > SILENCE_S

    def _ask_after(self, calls: list[Call]) -> None:
        for shard in dict.fromkeys(call.shard for call in calls):
            self.spawn(self._resend(shard, [call for call in calls if call.shard == shard]))

    async def _resend(self, shard: str, calls: list[Call]) -> None:
        for call in calls:
            call.is_resending, call.is_behind = True, False
        ids, firsts = [call.ask.id for call in calls], [len(call.tokens) for call in calls]
        asked = Resend(request_ids=ids, first_indexes=firsts, epochs=[0] * len(calls))
        try:
            self._apply(await self.bus.ask(RESEND.at(shard), asked, timeout_s=ASK_TIMEOUT_S))
            self._shards.answered(shard)
        except BusError as error:
            if self._shards.was_silent(shard) or error.code is Code.NO_RESPONDERS:
                self._lose(shard)
        for call in calls:
            call.is_resending = False
