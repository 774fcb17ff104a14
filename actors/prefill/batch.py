"""What a prefill replica computes next: first come, first served, in chunks, with a token budget a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from actors.prefill.keeping import Keeping
from actors.prefill.restore import NOTHING, Fetched, Restored, check, plan
from actors.rules.chain import BLOCK_TOKENS
from kernels.engine import Admission, Chunk, Engine, ImageRows, Sampling, Tokens
from schemas.bulk import Handle
from schemas.cache import HitShortened
from schemas.failure import Failure
from schemas.handover import Dispatch, HandOver
from schemas.request import Cancel, Failed, TokensEmitted
from schemas.routing import Routed

CHUNK_GRAIN = BLOCK_TOKENS
"""Chunks of a cut prompt are multiples of this (the block size), so that blocks fill at step ends."""


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
    """

    dispatch: Dispatch
    tokens: Tokens
    images: list[ImageRows] = field(default_factory=list)
    num_done: int = 0
    is_admitted: bool = False
    is_cancelled: bool = False
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
    def num_left(self) -> int:
        return len(self.tokens) - (self.num_done if self.is_admitted else self.restored.hit.start)

    @property
    def num_at_once(self) -> int:
        """How many of its tokens left to compute in its next step, if there is room."""
        return self.num_left if self.keeping is None else self.keeping.cut(self.num_done, self.num_left)

    def settle(self, restored: Restored, reason: str, fetched: Fetched | None = None) -> HitShortened | None:
        """It has turned out what is restored, after what was `fetched`. The entrypoint is to be told if it is less."""
        told, self.restored = self.restored, restored
        self.num_load_bytes = sum(map(len, restored.payloads)) + len(restored.windows or b"")
        if self.keeping is not None:
            self.keeping.settle(restored, fetched)
        return restored.shortened(told, self.id, self.dispatch.epoch, reason)

    def resumed(self, num_done: int) -> None:
        """What was restored is in the engine, and not needed here any more."""
        self.num_done, self.loading = num_done, Loading.NONE
        self.restored = replace(self.restored, payloads=(), windows=None)

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
        )

    def failed(self, source: str, failure: Failure) -> TokensEmitted:
        """For the entrypoint: it ends here, by `failure`."""
        return TokensEmitted(
            source=source,
            request_ids=[self.id],
            epochs=[self.dispatch.epoch],
            first_indexes=[0],
            counts=[0],
            tokens=[],
            ends=[(0, Failed(failure=failure))],
        )

    def is_over(self, now_ns: int) -> bool:
        """Nobody waits for it any more: cancelled, or past its deadline (its entrypoint then ends it by itself)."""
        return self.is_cancelled or 0 < self.dispatch.limits.deadline_ns < now_ns


def is_meant(cancel: Cancel, dispatch: Dispatch) -> bool:
    """Whether this cancel is for this dispatch of its request, not for an earlier one."""
    return not cancel.epoch or dispatch.epoch <= cancel.epoch


class Batch:
    """The queue and the running set of one replica. Its order is the order of arrival; nothing overtakes what can
    be computed: not what is loading, nor what is cut, which waits for its next step."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def add(self, job: Job) -> None:
        """Queue a job. Raises ValueError if one with its id is here."""
        if job.id in self._jobs:
            raise ValueError(f"request {job.id} is here already")
        self._jobs[job.id] = job

    def remove(self, job: Job) -> None:
        """The job is computed, cancelled or failed. Idempotent."""
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]

    def to_load(self, max_bytes: int) -> list[Job]:
        """The jobs that are to be loaded from now on, in order: together with all that are, and wait for the engine,
        they hold at most `max_bytes`; but one alone may hold more."""
        chosen = []
        num_bytes = self.num_load_bytes
        for job in self._jobs.values():
            if job.loading is not Loading.WAITING:
                continue
            if num_bytes and num_bytes + job.num_load_bytes > max_bytes:
                break
            num_bytes += job.num_load_bytes
            job.loading = Loading.RUNNING
            chosen.append(job)
        return chosen

    def admit(self, engine: Engine) -> tuple[list[Job], list[Job]]:
        """Give engine slots to waiting jobs in order, until one has to wait: those admitted, and those that can never
        be (they stay in the queue). Those that are not loaded yet keep their place, and delay nobody."""
        admitted, hopeless = [], []
        for job in self._jobs.values():
            if job.is_admitted or job.loading in (Loading.WAITING, Loading.RUNNING):
                continue
            sampling = job.dispatch.sampling
            wanted = Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
            bounded = 0 if job.dispatch.exact else len(job.tokens)
            admission = engine.admit(job.id, len(job.tokens), wanted, bounded_prompt=bounded)
            if admission is Admission.LATER:
                break
            if admission is Admission.NEVER:
                hopeless.append(job)
                continue
            job.is_admitted = True
            admitted.append(job)
        return admitted, hopeless

    def next_step(self, max_tokens: int) -> list[tuple[Job, Chunk]]:
        """The chunks of one step, at most `max_tokens` together. Cut, at the grain, are the last when there is no more
        room, and those at whose end windows are wanted: in the room behind these others get their turn.

        The first job always gets something, so there is progress whatever the budget.
        """
        step: list[tuple[Job, Chunk]] = []
        room = max_tokens
        for job in self._jobs.values():
            if not job.is_admitted or job.num_left == 0:
                continue
            num_tokens = wanted = job.num_at_once
            if wanted > room:
                end = (job.num_done + room) // CHUNK_GRAIN * CHUNK_GRAIN
                num_tokens = end - job.num_done
                if num_tokens <= 0:
                    if step:
                        break
                    num_tokens = min(wanted, CHUNK_GRAIN)
            step.append((job, Chunk(job.id, job.tokens[job.num_done : job.num_done + num_tokens])))
            room -= num_tokens
            if room <= 0 or num_tokens < wanted:
                break
        return step

    @property
    def num_image_bytes(self) -> int:
        """Held for its images."""
        return sum(len(image.embeddings) for job in self._jobs.values() for image in job.images)

    @property
    def num_load_bytes(self) -> int:
        """Held, or soon to be, for what is loading or loaded."""
        loaded = (Loading.RUNNING, Loading.DONE)
        return sum(job.num_load_bytes for job in self._jobs.values() if job.loading in loaded)

    @property
    def num_tokens_left(self) -> int:
        return sum(job.num_left for job in self._jobs.values())
