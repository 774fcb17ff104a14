"""Steps of an engine: what a batch of requests computes at once, in lock-step with the other ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.constraint import Bits, Logprobs
from kernels.engine import Chunk, Counts
from kernels.lockstep import Lockstep
from kernels.masks import Rows, mask_
from kernels.model import Model
from kernels.requests import NONE
from kernels.schedule import Scheduler
from kernels.slots import SlotRequest
from kernels.verify import verify


@dataclass(slots=True)
class _Run:
    """One request in a step: the token at `start` and the drafts behind it, what its constraint allows there (None
    without one; no rows: it cannot say), and how sure the drafts are."""

    request: SlotRequest
    start: int
    drafted: list[int] = field(default_factory=list)
    allowed: Bits | None = None
    confidence: list[float] = field(default_factory=list)

    def allow(self) -> None:
        """Ask the constraint, and keep the drafts that it allows."""
        if self.request.constraint is not None:
            self.allowed = self.request.constraint.allow(self.drafted)
            self.cut(max(len(self.allowed) - 1, 0))

    def cut(self, num_drafts: int) -> None:
        self.drafted = self.drafted[:num_drafts]
        if self.allowed is not None:
            self.allowed = self.allowed[: num_drafts + 1]

    @property
    def is_stuck(self) -> bool:
        return self.allowed is not None and not len(self.allowed)


class Stepping:
    """A model with the state of its requests, whose slots are those of `pool`.

    In a group each step is one of all ranks; one that has nothing to compute serves the others with its experts.
    """

    def __init__(self, model: Model, pool: StatePool, lockstep: Lockstep, scheduler: Scheduler, end_token: int) -> None:
        self.model, self.pool, self.lockstep = model, pool, lockstep
        self.counts = Counts(0, 0, 0)
        self._end_token = end_token
        self._scheduler = scheduler
        # Computed by this thread alone, a step is worth what the thread worked, not what others made it wait.
        is_alone = model.device.type == "cpu" and not lockstep.layers
        self._clock = time.thread_time if is_alone else time.perf_counter

    def prefill(self, requests: Sequence[SlotRequest], chunks: Sequence[Chunk]) -> int:
        """The next chunk of each request; the elapsed nanoseconds."""
        started_ns = time.perf_counter_ns()
        agreed = self.lockstep.begin(is_busy=bool(requests), drafts=False, rows=bool(requests))
        runs = [
            (request.slot, request.num_tokens, chunk.tokens.tolist())
            for request, chunk in zip(requests, chunks, strict=True)
        ]
        images = {request.slot: request.images for request in requests if request.images}
        if runs:
            hidden = self.model.forward(Batch.last_rows(runs, images), self.pool)
            for request, chunk, row in zip(requests, chunks, hidden, strict=True):
                request.advance(request.num_tokens + len(chunk.tokens))
                request.hidden = row.clone()
            if hidden.is_cuda:
                torch.cuda.synchronize()  # until then nothing but the launching has been timed
        elif agreed.rows:
            self.model.serve()
        return time.perf_counter_ns() - started_ns

    def decode(self, requests: Sequence[SlotRequest]) -> list[list[int]]:
        """Feed the last token of those that have sampled one, and what is drafted behind it; sample what follows.

        Raises GroupError when a rank is gone. All requests are then as they were: what was written of their state is
        behind its end, as that of drafts that are not accepted (design §6).
        """
        fed = [_Run(request, request.num_tokens) for request in requests if request.last != NONE]
        fresh = [_Run(request, request.num_tokens - 1) for request in requests if request.last == NONE]
        room = [max(0, run.request.num_reserved - run.start - 1) for run in fed]
        chosen = self._scheduler.choose([run.request.history for run in fed], room)
        agreed = self.lockstep.begin(is_busy=bool(requests), drafts=bool(chosen), rows=bool(fed))
        began_s = self._clock()
        if agreed.drafts:
            self._draft([fed[number] for number in chosen], [room[number] for number in chosen], len(fed))
        drafted_s = self._clock()
        for run in fed:
            if run.allowed is None:
                run.allow()
        fed.sort(key=lambda run: len(run.drafted))  # those of one length are computed at once
        rows = []
        if fed:
            batch = Batch.all_rows((run.request.slot, run.start, [run.request.last, *run.drafted]) for run in fed)
            rows.append(self.model.forward(batch, self.pool))
        elif agreed.rows:
            self.model.serve()
        # Of the others the last prompt row is at hand, as if that token were fed now.
        for run in fresh:
            run.allow()
        rows += [run.request.hidden[None] for run in fresh if run.request.hidden is not None]
        if not rows:
            return []
        new = self._sample([*fed, *fresh], torch.cat(rows))
        if fed:
            self._count(fed, len(chosen), new)
            lengths = [1 + len(run.drafted) for run in fed]
            self._scheduler.took(len(chosen), drafted_s - began_s, lengths, self._clock() - drafted_s)
        return [new[request.slot] for request in requests]

    def _sample(self, runs: Sequence[_Run], rows: torch.Tensor) -> dict[int, list[int]]:
        """The new tokens by slot: none where what was computed are no numbers, or a constraint cannot say what is
        allowed. Takes back what was drafted in vain."""
        logits = self.model.logits(rows)
        is_sound = ~logits.isnan().any(1)
        if not bool(is_sound.all()):
            logits = logits.masked_fill(~is_sound.unsqueeze(1), 0.0)  # of requests that end here
        counts = [1 + len(run.drafted) for run in runs]
        samplings = [run.request.sampling for run in runs]
        told = [
            torch.log_softmax(own.double(), 1) if sampling.top_logprobs >= 0 else None
            for sampling, own in zip(samplings, torch.split(logits, counts), strict=True)
        ]
        masks = [
            Rows(num, run.start + 1, sampling, None if run.is_stuck else run.allowed)
            for num, run, sampling in zip(counts, runs, samplings, strict=True)
        ]
        mask_(logits, masks, self._end_token, self.model.config.image_token_id)
        found = verify(logits, [run.drafted for run in runs], [run.start for run in runs], samplings)
        new: dict[int, list[int]] = {}
        sound = torch.split(is_sound, counts)
        for run, tokens, each, log in zip(runs, found, sound, told, strict=True):
            request = run.request
            if run.is_stuck or not bool(each.all()):
                new[request.slot] = []
                continue
            request.num_tokens = run.start + len(tokens)
            if len(tokens) <= len(run.drafted):
                self.pool.truncate(request.slot, request.num_tokens)
            request.last, request.hidden = tokens[-1], None
            if request.constraint is not None:
                request.constraint.accept(tokens)
            if log is not None:
                request.logprobs = _logprobs(log, tokens, request.sampling.top_logprobs)
            self._scheduler.learn(request.history, run.confidence, len(tokens) - 1)
            new[request.slot] = tokens
        return new

    def _draft(self, runs: Sequence[_Run], room: Sequence[int], num_fed: int) -> None:
        """Give each of `runs` what may follow its last token: as many of a block of proposals as there is room for, its
        constraint allows, and verifying pays. `num_fed`: requests of the step."""
        drafter = self.model.drafter
        assert drafter is not None
        if not runs:
            drafter.serve()
            return
        blocks = drafter.draft(
            [(run.request.slot, run.request.last) for run in runs], [run.request.sampling for run in runs], self.pool
        )
        for run, tokens, most in zip(runs, blocks.tokens.tolist(), room, strict=True):
            run.drafted = tokens[:most]
            run.allow()
        raw = blocks.confidence.double().cpu().numpy()
        histories = [run.request.history for run in runs]
        lengths, confidence = self._scheduler.admit(raw, [len(run.drafted) for run in runs], histories, num_fed)
        for run, length, sure in zip(runs, lengths, confidence.tolist(), strict=True):
            run.cut(length)
            run.confidence = sure[:length]

    def _count(self, fed: Sequence[_Run], num_blocks: int, new: dict[int, list[int]]) -> None:
        drafted, verified, accepted = self.counts
        self.counts = Counts(
            drafted + num_blocks * self.model.config.dspark_block_size,
            verified + sum(1 + len(run.drafted) for run in fed),
            accepted + sum(max(len(new[run.request.slot]) - 1, 0) for run in fed),
        )


def _logprobs(log: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Of sampled `tokens` and the likeliest beside them: `log` [rows, vocab] fp64, at least as many rows as tokens."""
    values, ids = log[: len(tokens)].topk(num_top, 1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    sampled = log[range(len(tokens)), list(tokens)].tolist()
    return [Logprobs(one, top) for one, top in zip(sampled, tops, strict=True)]
