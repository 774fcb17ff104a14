"""One request in a prefill replica: what was dispatched, what of it is restored, computed, and left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from actors.prefill.keeping import Keeping
from actors.prefill.restore import NOTHING, Fetched, Restored, check, plan
from actors.rules.cost import Cost, Terms, Work, chunk_terms
from actors.rules.hit import bounded_tokens
from kernels.engine import ImageRows, Tokens
from schemas.bulk import Handle
from schemas.cache import HitShortened
from schemas.handover import Dispatch, HandOver
from schemas.request import Cancel, LastWord, TokensEmitted
from schemas.routing import Route, Routed


class Loading(Enum):
    """Of the cached beginning of a prompt: nothing to load; not begun; under way; done, and in memory."""

    NONE = "none"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Job:
    """One dispatched request. `num_done` of its tokens are computed or restored; `is_admitted` while it has an engine
    slot. `restored`: what is to be, or while it loads, what the entrypoint counts on. `keeping`: None if nothing is.
    `is_returned`: it needs an image that it was not given, and is to be dispatched anew; `is_given_back`: so it is, as
    the replica leaves. `number`: its place in the
    order of arrival, at `arrived_s` of the caller's clock. `num_passed`: so many got a slot before it, as they are
    shorter.
    """

    dispatch: Dispatch
    tokens: Tokens
    images: list[ImageRows] = field(default_factory=list)
    num_done: int = 0
    is_admitted: bool = False
    is_cancelled: bool = False
    is_returned: bool = False
    is_given_back: bool = False
    number: int = 0
    arrived_s: float = 0.0
    num_passed: int = 0
    loading: Loading = Loading.NONE
    num_load_bytes: int = 0
    restored: Restored = NOTHING
    keeping: Keeping | None = None

    @classmethod
    def of(
        cls,
        dispatch: Dispatch,
        prompt: bytes,
        rows: Sequence[bytes],
        *,
        space: str = "",
        block_bytes: int = 0,
        branches: Sequence[int] = (),
    ) -> Job:
        """From what was pulled for it: the prompt, and the rows of each image. Blocks of another `space` are of no use.
        `branches`: see `Keeping`.

        Raises ValueError if that is not what was announced.
        """
        if not prompt or len(prompt) != 4 * dispatch.num_prompt_tokens:
            raise ValueError(f"{len(prompt)} bytes came for {dispatch.num_prompt_tokens} prompt tokens")
        tokens = np.frombuffer(prompt, dtype="<u4")
        images = []
        for image, data in zip(dispatch.images, rows, strict=True):
            span = tokens[image.start : image.start + image.num_tokens]
            if not len(span) or len(span) != image.num_tokens or (span != span[0]).any():
                raise ValueError(f"the prompt has no place for an image of {image.num_tokens} tokens at {image.start}")
            if not data or len(data) % (4 * len(span)):
                raise ValueError(f"{len(data)} bytes came for an image of {image.num_tokens} tokens")
            images.append(ImageRows(image.start, data))
        job = cls(dispatch, tokens, images)
        prefix = dispatch.prefix
        if prefix is not None:
            check(prefix, len(tokens))
            job.restored = plan(prefix, len(tokens))
            if prefix.space == space:
                job.keeping = Keeping(prefix, tokens, block_bytes, branches)
                if job.restored.hit.num_blocks and not dispatch.exact:
                    job.loading = Loading.WAITING
                    snapshots = [snapshot.handle.size_bytes for _, snapshot in prefix.snapshots]
                    job.num_load_bytes = prefix.num_blocks * block_bytes + max(snapshots, default=0)
        return job

    @property
    def id(self) -> str:
        return self.dispatch.request_id

    @property
    def tenant(self) -> str:
        return self.dispatch.tenant

    @property
    def num_bounded(self) -> int:
        """Of its tokens, those that are its prompt: what is restored ends in it, and decoder layers compute the last
        window of it only, unless all is to be `exact`. What is behind it is output, which they compute."""
        return bounded_tokens(len(self.tokens), self.dispatch.num_output)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - (self.num_done if self.is_admitted else self.restored.hit.start)

    def left_ns(self, cost: Cost) -> float:
        """What is left to do for it, alone: to load, too, until that is in the engine."""
        num_left, num_blocks = self.num_left, 0 if self.is_admitted else self.restored.hit.num_blocks
        num_done = len(self.tokens) - num_left
        return cost.work_ns(Work(num_left, num_done, num_blocks=num_blocks, is_exact=self.dispatch.exact))

    def chunk(self, num_tokens: int) -> Terms:
        """Of a step that computes its next `num_tokens`."""
        behind = self.num_bounded - self.num_done - num_tokens
        return chunk_terms(num_tokens, self.num_done, behind, is_exact=self.dispatch.exact)

    @property
    def num_at_once(self) -> int:
        """How many of its tokens left to compute in its next step, if there is room."""
        return self.num_left if self.keeping is None else self.keeping.cut(self.num_done, self.num_left)

    def settle(self, restored: Restored, reason: str, fetched: Fetched | None = None) -> HitShortened | None:
        """It has turned out what is restored, after what was `fetched`. The entrypoint is to be told if it is less.

        The job is returned when an image that ends behind the new start may not have been given.
        """
        told, self.restored = self.restored, restored
        self.num_load_bytes = sum(map(len, restored.payloads)) + len(restored.windows or b"")
        if self.keeping is not None:
            self.keeping.settle(restored, fetched)
        prefix = self.dispatch.prefix
        self.is_returned = prefix is not None and restored.hit.start < prefix.images_from
        return restored.shortened(told, self.id, self.dispatch.epoch, reason, is_returned=self.is_returned)

    def resumed(self, num_done: int) -> None:
        """What was restored is in the engine, and not needed here any more."""
        self.num_done, self.loading = num_done, Loading.NONE
        self.restored = replace(self.restored, payloads=(), windows=None)

    def route(self) -> Route:
        """What is asked of the decode balancer."""
        return Route(
            request_id=self.id,
            num_new=self.dispatch.limits.max_tokens - self.dispatch.num_output,
            num_cached=len(self.tokens),
            deadline_ns=self.dispatch.limits.deadline_ns,
            tenant=self.tenant,
            is_whole=self.dispatch.is_protected,
        )

    def hand_over(self, to: Routed, state: Handle, layout: str) -> HandOver:
        """What goes to a decode replica with its state."""
        return HandOver(
            request_id=self.id,
            entrypoint=self.dispatch.entrypoint,
            epoch=self.dispatch.epoch,
            reservation=to.reservation,
            balancer=to.balancer,
            state=state,
            layout=layout,
            num_tokens=len(self.tokens),
            sampling=self.dispatch.sampling,
            limits=self.dispatch.limits,
            chain=None if self.keeping is None else self.keeping.chain(),
            num_output=self.dispatch.num_output,
            is_protected=self.dispatch.is_protected,
            tenant=self.tenant,
        )

    def ended(self, source: str, end: LastWord) -> TokensEmitted:
        """For the entrypoint: how it ends here."""
        return TokensEmitted(
            source=source,
            request_ids=[self.id],
            epochs=[self.dispatch.epoch],
            first_indexes=[0],
            counts=[0],
            tokens=[],
            ends=[(0, end)],
        )

    def is_over(self, now_ns: int) -> bool:
        """Nobody waits for it here: cancelled, given back, or past its deadline (its entrypoint ends it by itself)."""
        return self.is_cancelled or self.is_given_back or 0 < self.dispatch.limits.deadline_ns < now_ns


def is_meant(cancel: Cancel, dispatch: Dispatch) -> bool:
    """Whether this cancel is for this dispatch of its request, not for an earlier one."""
    return not cancel.epoch or dispatch.epoch <= cancel.epoch
