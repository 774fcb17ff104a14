"""All clients and the recipe in front of them, which nothing happens to: what each request is owed, and what came."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from actors.recipe.requests import loss_of
from actors.recipe.shards import Shards
from actors.recipe.submission import Submission
from actors.rules.tenants import Tenant, Tenants
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.entrypoints import ask_after, cancel_at, submit
from bus.images import AnyVision
from bus.limits import AnyQuota
from bus.subjects import EXITED, LOAD, RECIPE_TOKENS, Address, Subject, report_load
from run.simulate.chaos.call import Call
from run.simulate.chaos.images import file
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
    Preempted,
    Resend,
    Taken,
    TokenLogprobs,
    TokensEmitted,
)
from schemas.routing import LoadReported, ReportLoad
from schemas.vision import Image, ImageResolved

SILENCE_S = 5.0
WATCH_S = 1.0

NEVER_LIMITED, SOON_LIMITED = "t1", "t2"
PER_MINUTE = 2
TENANTS = Tenants(
    {
        NEVER_LIMITED: Tenant(NEVER_LIMITED, requests_per_minute=1000, tokens_per_minute=1_000_000),
        SOON_LIMITED: Tenant(SOON_LIMITED, requests_per_minute=PER_MINUTE),
    }
)
"""One who is never at the limit, and one who soon is. Others have none."""

_OWNERS = (Role.ENTRYPOINT, Role.QUOTA)

Violate = Callable[[str, str], None]
"""A rule is broken: which, and how."""


class Clients(Actor):
    """What a recipe does with its requests, without a model's words for them."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus, bulk: Bulk, violate: Violate) -> None:
        super().__init__(id, bus)
        self._bulk, self._violate = bulk, violate
        self._shards, self._quotas = Shards(), Shards()
        self._vision = AnyVision(bus, bulk)
        self._quota = AnyQuota(bus, lambda tenant, tried: self._quotas.owner(tenant, tried, self.now_s()))
        self.calls: dict[str, Call] = {}
        self.num_admitted = Counter[str]()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RECIPE_TOKENS: self._on_tokens}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {**{LOAD.at(role): self._on_load for role in _OWNERS}, EXITED.all(): self._on_exited}

    async def on_start(self) -> None:
        for role in _OWNERS:
            await self.bus.tell(report_load(role).all(), ReportLoad())
        self.spawn(self._watch())

    def open(self) -> list[Call]:
        """Those that have not ended."""
        return [call for call in self.calls.values() if call.end is None]

    # Asking

    async def ask(self, ask: Ask, answer: Answer, *, has_quota: bool) -> None:
        """Send a request on its way."""
        now_s, images = self.now_s(), list[ImageResolved]()
        call = self.calls[ask.id] = Call(ask, answer, begun_s=now_s, heard_s=now_s)
        try:
            if ask.images:
                images = await self._resolve(call)
            tokens, starts = prompt(ask)
            call.submit(self.id, tokens.tobytes(), [_image(*one) for one in zip(starts, images, strict=True)])
            assert call.submission is not None
            if has_quota and TENANTS.get(ask.tenant).is_limited:
                await self._quota.admit(call.submission.admit(), lambda: call.is_cancelled)
                self.num_admitted[ask.tenant] += 1
            await self._submit(call, call.submission)
        except BusError as error:
            self._release(images)
            self._close(call, Failed(failure=error.failure), is_ours=True)

    async def _submit(self, call: Call, submission: Submission) -> None:
        owner = self._shards.owner_of(call.ask.id, self.now_s)
        await submit(self.bus, self._bulk, call, submission, owner, submission.move)

    async def _resolve(self, call: Call) -> list[ImageResolved]:
        files = [file(image) for image in call.ask.images]
        found = await self._vision.resolve(files, call.deadline_ns, lambda: call.is_cancelled)
        images = [one for one in found if not isinstance(one, Failure)]
        for one in found:
            if isinstance(one, Failure):
                self._release(images)
                raise BusError(one)
        return images

    def _release(self, images: list[ImageResolved]) -> None:
        self.spawn(self._vision.release([(image.vision, image.pixels) for image in images]))

    async def cancel(self, id: str) -> None:
        """Its client wants it no more."""
        call = self.calls[id]
        if call.end is None:
            call.is_cancelled = True
            self._close(call, Cancelled(), is_ours=True)
            if call.shard:
                await cancel_at(self.bus, call.shard, call.sent_as, CancelReason.CLIENT)

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
            call, end = self.calls[id.partition("-")[0]], ends.get(i)
            if call.end is not None or id != call.sent_as:
                self._hear_late(call, id, shard, emitted.first_indexes[i], tokens, end)
                continue
            call.shard = call.shard or shard  # tokens may overtake the answer to Submit
            loss = None if isinstance(end, Preempted) else loss_of(end, emitted.epochs[i])
            self._hear(call, emitted.first_indexes[i], tokens, None if loss else end, said.get(i))
            if loss is not None:
                self._move(call, loss)

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
        call.emitted(tokens[known:])
        if isinstance(end, Preempted):
            self._violate("ends", f"{call.ask.id}: its client is told that it made way")
        elif end is not None:
            self._close(call, end)

    def _hear_late(
        self, call: Call, id: str, shard: str, first: int, tokens: list[int], end: LastWord | None
    ) -> None:
        """Something after the end, or of who has it no more: nothing new may be in it, unless it was ended here."""
        self._check(call, first, tokens)
        if call.is_ours or id != call.sent_as:
            if end is None:
                self.spawn(cancel_at(self.bus, shard, id, CancelReason.CLIENT_GONE))
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
            if self._quota.is_asked(call.ask.id):
                self.spawn(self._quota.end(call.ask.id, len(call.tokens)))

    # Watching

    async def _on_load(self, report: LoadReported, envelope: Envelope) -> None:
        if report.role == Role.QUOTA:
            self._quotas.saw(report, self.now_s())
        elif self._shards.saw(report, self.now_s()):
            self._ask_after([call for call in self.open() if call.shard == report.id])

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        self._vision.on_exited(exited)
        for shard in self._shards.ended(exited):
            self._lose(shard)

    def _lose(self, shard: str) -> None:
        self._shards.forget(shard)
        failure = Failure(code=Code.WORKER_LOST, message=f"the entrypoint {shard} that held the request was lost")
        for call in [call for call in self.open() if call.shard == shard]:
            self._move(call, failure)

    def _move(self, call: Call, loss: Failure) -> None:
        """Its shard is lost, and another one is to go on with it; else it ends so."""
        if not call.move(self.now_s()):
            self._close(call, Failed(failure=loss), is_ours=True)
        elif call.submission is not None and not call.is_placing:
            self.spawn(self._go_on(call, call.submission, loss))

    async def _go_on(self, call: Call, submission: Submission, loss: Failure) -> None:
        try:
            await self._submit(call, submission)
        except BusError as error:
            self._close(call, Failed(failure=error.failure if call.is_cancelled else loss), is_ours=True)

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
        ids, firsts = [call.sent_as for call in calls], [len(call.tokens) for call in calls]
        asked = Resend(request_ids=ids, first_indexes=firsts, epochs=[0] * len(calls))
        try:
            if (emitted := await ask_after(self.bus, shard, asked)) is not None:
                self._apply(emitted)
                self._shards.answered(shard)
        except BusError as error:
            if self._shards.was_silent(shard) or error.code is Code.NO_RESPONDERS:
                self._lose(shard)
        for call in calls:
            call.is_resending = False


def _image(start: int, found: ImageResolved) -> Image:
    return Image(start=start, **structs.asdict(found))
