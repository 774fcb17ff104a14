"""One request as its entrypoint shard sees it: who owns it, what it emitted, and its one end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from msgspec import structs

from actors.entrypoint.images import Images
from actors.entrypoint.lookup import Names, Plan
from actors.entrypoint.owner import UNKNOWN, Life, Owner
from actors.rules.chain import BLOCK_TOKENS
from actors.rules.hit import EXACT_OUTPUT, Hit, bounded_tokens
from actors.rules.logprobs import KeptLogprobs
from schemas.bulk import Handle, Payload
from schemas.cache import HitShortened
from schemas.failure import Code, Failure
from schemas.handover import Claimed, ClaimRefused, Dispatch
from schemas.message import Role
from schemas.request import (
    Cancelled,
    CancelReason,
    End,
    Failed,
    Finished,
    FinishReason,
    LastWord,
    Preempted,
    Submit,
)
from schemas.routing import Route, Routed
from schemas.vision import EncodeImage

MAX_RETURNS = 1
"""Prefill gives a request back when it lacks an image; then it is given all of them, and cannot do so again."""


MAX_PREEMPTIONS = 2
"""A request that had to make way so many times has room for all of it next time, and does so no more."""

MAX_LOSSES = 3
"""A request that so many owners were lost with ends: it may be what they died of, and is not to be given to all."""


class Verdict(Enum):
    """What became of a batch of tokens: NEWS was taken, STALE was seen before or is not the owner's, GAP is missing
    something before it, GIVEN_BACK was taken, and its owner has no more: the request is to be rebuilt. So it is when it
    is LOST: its owner says that it does not have it."""

    NEWS = "news"
    STALE = "stale"
    GAP = "gap"
    GIVEN_BACK = "given back"
    LOST = "lost"


@dataclass(slots=True)
class Request:
    """The state machine: waiting → dispatched to prefill → claimed by decode → ended; and back to waiting when prefill
    refuses or returns it, or its state is gone: then it is rebuilt, from its prompt and the output so far.

    The shard alone issues epochs, from one growing series for all its requests: each change of owner gets the next
    one, and tokens count only under the current one. So nothing said of an earlier request of the same id counts.
    `hit` is what became of its cached prefix at the last dispatch before its output began; `is_approximate`, that a
    replay has part in its output, from some token on.
    `is_placing`: somebody is looking for a prefill replica for it; not more than one at a time may be.
    `life`: of its owner, as far as that has said so. Times are seconds of the caller's clock.
    """

    submit: Submit
    epochs: Iterator[int]
    heard_s: float
    prompt: bytes = b""
    images: Images = field(init=False)
    is_placing: bool = True
    num_returns: int = 0
    num_rebuilt: int = 0
    num_preempted: int = 0
    num_lost: int = 0
    names: Names | None = None
    plan: Plan | None = None
    planned_s: float = 0.0
    hit: Hit = Hit()
    is_approximate: bool = False
    was_approximate: bool = False
    epoch: int = 0
    claimed_from: int = 0
    is_dispatching: bool = False
    owner: Owner | None = None
    life: Life = UNKNOWN
    tokens: list[int] = field(default_factory=list)
    logprobs: KeptLogprobs | None = field(init=False)
    end: End | None = None
    ended_s: float = 0.0

    @property
    def id(self) -> str:
        return self.submit.request_id

    def __post_init__(self) -> None:
        self.images = Images(self.submit.images)
        self.logprobs = KeptLogprobs.of(self.submit.sampling)

    @property
    def num_tokens(self) -> int:
        """Of its prompt and the output so far."""
        return self.submit.num_prompt_tokens + len(self.tokens)

    @property
    def text(self) -> bytes:
        """What prefill is given: the prompt, and behind it the output so far, token ids as little-endian u32."""
        return self.prompt + np.array(self.tokens, dtype="<u4").tobytes() if self.tokens else self.prompt

    @property
    def num_bounded(self) -> int:
        """Of these tokens, those that cached blocks can be of."""
        return bounded_tokens(self.num_tokens, len(self.tokens))

    @property
    def is_protected(self) -> bool:
        """It is not to be preempted. Nor may one with images: vision has let go of what they were made of, and they may
        not all be cached."""
        return self.num_preempted >= MAX_PREEMPTIONS or bool(self.submit.images)

    def was_read(self, text: bytes) -> None:
        """What it was submitted with: its prompt, and behind it the output of which an earlier shard has told."""
        tokens = np.frombuffer(text, "<u4")
        num_prompt = len(tokens) - self.submit.num_output
        self.prompt, self.tokens = tokens[:num_prompt].tobytes(), tokens[num_prompt:].tolist()

    def must_be_placed(self) -> bool:
        """It waits for a prefill replica."""
        return self.owner is None and self.end is None

    def is_overdue(self, now_ns: int) -> bool:
        """Is its deadline over?"""
        return 0 < self.submit.limits.deadline_ns < now_ns

    def failed_by(self, failure: Failure, now_ns: int) -> Failed:
        """How it ends for what was answered, or not in time: that somebody was silent is not its own deadline."""
        if failure.code is not Code.DEADLINE_EXCEEDED or failure.field:
            return failed(failure)
        return failed(OVERDUE if self.is_overdue(now_ns) else structs.replace(failure, code=Code.WORKER_LOST))

    def to_encode(self) -> list[EncodeImage]:
        """What vision has still to do for it."""
        deadline_ns = self.submit.limits.deadline_ns
        wanted = self.images.wanted(self._images_from()) if self.end is None else []
        return [EncodeImage(request_id=self.id, image=image, deadline_ns=deadline_ns) for image in wanted]

    def let_go(self) -> list[tuple[str, Handle]]:
        """What vision replicas need not hold for it any more, as (replica, handle)."""
        is_decoding = self.owner is not None and self.owner.role is Role.DECODE
        return [] if self.is_placing else self.images.let_go(is_computed=is_decoding or self.end is not None)

    def _images_from(self) -> int:
        """Images that end at or before this token need not be encoded."""
        return self.plan.hit.start if self.plan and not self.num_returns else 0

    def was_looked_up(self, names: Names, plan: Plan, now_s: float) -> None:
        """What of its prompt is cached."""
        if self.end is None:
            self.names, self.plan, self.planned_s = names, plan, now_s

    def is_plan_older(self, age_s: float, now_s: float) -> bool:
        """Should be looked up (again)."""
        return now_s - self.planned_s > age_s

    def route(self) -> Route:
        """What it asks of a prefill replica."""
        hit, submit = self.plan.hit if self.plan else Hit(), self.submit
        num_cached = hit.num_blocks * BLOCK_TOKENS
        return Route(
            request_id=self.id,
            num_new=self.num_tokens - num_cached,
            num_cached=num_cached,
            num_replayed=hit.num_replayed,
            num_blocks=hit.num_blocks,
            deadline_ns=submit.limits.deadline_ns,
            tenant=submit.tenant,
            is_exact=submit.exact,
        )

    def dispatch(self, replica: str, now_s: float) -> int:
        """A prefill replica is about to be given the request. The epoch it holds it under.

        Until `dispatched` or `refused` it need not know of it.
        """
        self._restores(*(self.plan.hit, self.plan.is_approximate) if self.plan else (Hit(), False))
        self.is_dispatching = True
        self.epoch = next(self.epochs)
        self.owner, self.life = Owner(Role.PREFILL, replica), UNKNOWN
        self.heard_s = now_s
        return self.epoch

    def _restores(self, hit: Hit, is_approximate: bool) -> None:
        """What becomes of its cached prefix. Usage is of the prompt as it was when output began."""
        if not self.tokens:
            self.hit = hit
        is_bounded = len(self.tokens) > EXACT_OUTPUT and not self.submit.exact
        self.is_approximate = self.was_approximate or is_approximate or is_bounded

    def to_dispatch(self, entrypoint: str, routed: Routed, prompt: Payload) -> Dispatch:
        """The message that gives it to the replica, under the present epoch. Nothing may be left `to_encode`."""
        prefix = self.plan.prefix if self.plan else None
        images_from, images = self.images.given(self._images_from())
        if prefix is not None and images_from:
            prefix = structs.replace(prefix, images_from=images_from)
        return Dispatch(
            request_id=self.id,
            entrypoint=entrypoint,
            epoch=self.epoch,
            reservation=routed.reservation,
            balancer=routed.balancer,
            prompt=prompt,
            num_prompt_tokens=self.num_tokens,
            sampling=self.submit.sampling,
            limits=self.submit.limits,
            images=images,
            exact=self.submit.exact,
            prefix=prefix,
            branches=self.submit.branches,
            tenant=self.submit.tenant,
            num_output=len(self.tokens),
            is_protected=self.is_protected,
        )

    def shortened(self, said: HitShortened) -> bool:
        """Prefill restores less, or otherwise; or returns the request for that. True if somebody has to place it anew.

        What is said of an earlier dispatch than the last one does not count, so each is returned once at most.
        """
        is_decoding = self.owner is not None and self.owner.role is Role.DECODE
        if said.epoch != (self.claimed_from if is_decoding else self.epoch) or self.end is not None:
            return False
        if not said.is_returned:
            self._restores(Hit(said.num_blocks, said.start), said.approximate)
            return False
        if self.owner is None or is_decoding:
            return False
        self.num_returns += 1
        return self._waits()

    def rebuild(self) -> bool:
        """Its owner has it no more: it waits again, with the output so far. True if somebody has to place it anew."""
        self.num_rebuilt += 1
        self.names, self.plan = None, None
        self.was_approximate = self.is_approximate and bool(self.tokens)
        return self._waits()

    def _waits(self) -> bool:
        self.refused()
        must_begin, self.is_placing = not self.is_placing, True
        return must_begin

    def num_cached(self, first_index: int) -> int:
        """Tokens of its prompt that were not computed, to be said with its output from index 0 on."""
        return self.hit.start if first_index == 0 else 0

    def attributes(self) -> dict[str, int | bool]:
        """For the span: what its cache hit was worth, and how often it was computed anew."""
        rebuilt = {"shoal.rebuilt": self.num_rebuilt} if self.num_rebuilt else {}
        return {"shoal.cache.hit_tokens": self.hit.start, "shoal.cache.approximate": self.is_approximate, **rebuilt}

    def dispatched(self, now_s: float, life: Life = UNKNOWN) -> None:
        """The replica has it."""
        self.is_dispatching = False
        self.life = life
        self.heard_s = now_s

    def refused(self) -> None:
        """The replica did not take it, or did not say, or returned it: what it does under that epoch counts no more."""
        self.is_dispatching = False
        self.epoch = next(self.epochs)
        self.owner, self.life = None, UNKNOWN

    def claim(self, from_epoch: int, replica: str, now_s: float, life: Life = UNKNOWN) -> Claimed | ClaimRefused:
        """A decode replica has the state. The first claim from the current epoch wins; a repeated one is confirmed."""
        if self.end is not None:
            return ClaimRefused(reason="the request has ended")
        if from_epoch == self.claimed_from and self.owner == Owner(Role.DECODE, replica):
            return Claimed(epoch=self.epoch)
        if from_epoch != self.epoch:
            return ClaimRefused(reason=f"epoch {from_epoch} is over, {self.epoch} is current")
        self.claimed_from = from_epoch
        self.is_dispatching = False
        self.epoch = next(self.epochs)
        self.owner, self.life = Owner(Role.DECODE, replica), life
        self.heard_s = now_s
        return Claimed(epoch=self.epoch)

    def accept(
        self, epoch: int, first_index: int, tokens: Sequence[int], end: LastWord | None, now_s: float
    ) -> Verdict:
        """Tokens (and perhaps the end, or that it is given back) from whoever says to own the request.

        Taken are only those of the current epoch, each index once. After a GAP nothing was taken: ask for a resend.
        """
        if self.end is not None or epoch != self.epoch:
            return Verdict.STALE
        self.heard_s = now_s
        if first_index > len(self.tokens):
            return Verdict.GAP
        fresh = tokens[len(self.tokens) - first_index :]
        if not fresh and end is None:
            return Verdict.STALE
        self.tokens.extend(fresh)
        if isinstance(end, Preempted):
            self.num_preempted += 1
            return Verdict.GIVEN_BACK
        if isinstance(end, Failed) and end.failure.code is Code.WORKER_LOST:
            return Verdict.LOST
        if end is not None:
            self.finish(end, now_s)
        return Verdict.NEWS

    def finish(self, end: End, now_s: float) -> bool:
        """End the request. False, and nothing changes, if it has ended before."""
        if self.end is not None:
            return False
        self.end = end
        self.ended_s = now_s
        self.prompt, self.names, self.plan = b"", None, None
        return True


OVERDUE = Failure(code=Code.DEADLINE_EXCEEDED, message="the deadline of the request has passed", field="deadline")


def failed(failure: Failure) -> Failed:
    """How a request ends that cannot go on."""
    return Failed(failure=failure)


def end_by(reason: CancelReason) -> End:
    """How a request ends that is cancelled for this reason."""
    return Finished(reason=FinishReason.STOP) if reason is CancelReason.STOP_SEQUENCE else Cancelled()
