"""Steps of an engine: what a batch of requests computes at once, in lock-step with the other ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.constraint import Bits, Logprobs
from kernels.engine import Chunk
from kernels.lockstep import Lockstep
from kernels.masks import Rows, mask_
from kernels.model import Model
from kernels.requests import NONE
from kernels.slots import SlotRequest
from kernels.verify import verify


class Stepping:
    """A model with the state of its requests, whose slots are those of `pool`.

    In a group each step is one of all ranks; one that has nothing to compute serves the others with its experts.
    """

    def __init__(self, model: Model, pool: StatePool, lockstep: Lockstep, drafts: bool, end_token: int) -> None:
        self.model, self.pool, self.lockstep = model, pool, lockstep
        self._end_token = end_token
        self._drafts = drafts and model.drafter is not None

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
        """Feed the last token of those that have sampled one, and what is drafted behind it; sample what follows."""
        fed = [request for request in requests if request.last != NONE]
        fresh = [request for request in requests if request.last == NONE]
        room = [max(0, request.num_reserved - request.num_tokens - 1) for request in fed]
        wants_drafts = self._drafts and any(room)
        agreed = self.lockstep.begin(is_busy=bool(requests), drafts=wants_drafts, rows=bool(fed))
        drafts, allowed = _allow(fed, self._draft(fed, room, agreed.drafts))
        rows = []
        if fed:
            runs = [
                (request.slot, request.num_tokens, [request.last, *drafted])
                for request, drafted in zip(fed, drafts, strict=True)
            ]
            rows.append(self.model.forward(Batch.all_rows(runs), self.pool))
        elif agreed.rows:
            self.model.serve()
        # Of the others the last prompt row is at hand, as if that token were fed now.
        rows += [request.hidden[None] for request in fresh if request.hidden is not None]
        if not rows:
            return []
        starts = [request.num_tokens for request in fed] + [request.num_tokens - 1 for request in fresh]
        none, first = _allow(fresh, [[] for _ in fresh])
        new = self._sample([*fed, *fresh], starts, [*drafts, *none], [*allowed, *first], torch.cat(rows))
        return [new[request.slot] for request in requests]

    def _sample(
        self,
        requests: Sequence[SlotRequest],
        starts: Sequence[int],
        drafts: list[list[int]],
        allowed: Sequence[Bits | None],
        rows: torch.Tensor,
    ) -> dict[int, list[int]]:
        """The new tokens by slot: none where what was computed are no numbers, or a constraint cannot say what is
        allowed. Takes back what was drafted in vain."""
        logits = self.model.logits(rows)
        is_sound = ~logits.isnan().any(1)
        if not bool(is_sound.all()):
            logits = logits.masked_fill(~is_sound.unsqueeze(1), 0.0)  # of requests that end here
        counts = [1 + len(drafted) for drafted in drafts]
        told = [
            torch.log_softmax(own.double(), 1) if request.sampling.top_logprobs >= 0 else None
            for request, own in zip(requests, torch.split(logits, counts), strict=True)
        ]
        is_stuck = [bits is not None and not len(bits) for bits in allowed]
        masks = [
            Rows(num, start + 1, request.sampling.first_end, None if stuck else bits)
            for num, start, request, bits, stuck in zip(counts, starts, requests, allowed, is_stuck, strict=True)
        ]
        mask_(logits, masks, self._end_token, self.model.config.image_token_id)
        found = verify(logits, drafts, starts, [request.sampling for request in requests])
        new: dict[int, list[int]] = {}
        sound = torch.split(is_sound, counts)
        for request, start, tokens, each, stuck, log in zip(
            requests, starts, found, sound, is_stuck, told, strict=True
        ):
            if stuck or not bool(each.all()):
                new[request.slot] = []
                continue
            request.num_tokens = start + len(tokens)
            self.pool.truncate(request.slot, request.num_tokens)
            request.last, request.hidden = tokens[-1], None
            if request.constraint is not None:
                request.constraint.accept(tokens)
            if log is not None:
                request.logprobs = _logprobs(log, tokens, request.sampling.top_logprobs)
            new[request.slot] = tokens
        return new

    def _draft(self, requests: Sequence[SlotRequest], room: Sequence[int], is_agreed: bool) -> list[list[int]]:
        """What may follow the last token of each: the whole block of proposals, as far as there is room for it."""
        drafter = self.model.drafter
        if drafter is None or not is_agreed:
            return [[] for _ in requests]
        if not any(room):
            drafter.serve()
            return [[] for _ in requests]
        runs = [(request.slot, request.last) for request in requests]
        tokens = drafter.draft(runs, [request.sampling for request in requests], self.pool).tokens.tolist()
        return [drafted[:most] for drafted, most in zip(tokens, room, strict=True)]


def _allow(requests: Sequence[SlotRequest], drafts: Sequence[list[int]]) -> tuple[list[list[int]], list[Bits | None]]:
    """Those of the drafts that the requests' constraints allow, and what they allow at each place."""
    allowed = [
        None if request.constraint is None else request.constraint.allow(drafted)
        for request, drafted in zip(requests, drafts, strict=True)
    ]
    kept = [
        drafted if bits is None else drafted[: max(len(bits) - 1, 0)]
        for drafted, bits in zip(drafts, allowed, strict=True)
    ]
    return kept, allowed


def _logprobs(log: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Of sampled `tokens` and the likeliest beside them: `log` [rows, vocab] fp64, at least as many rows as tokens."""
    values, ids = log[: len(tokens)].topk(num_top, 1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    sampled = log[range(len(tokens)), list(tokens)].tolist()
    return [Logprobs(one, top) for one, top in zip(sampled, tops, strict=True)]
