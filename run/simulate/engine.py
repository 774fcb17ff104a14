"""An engine that only spends time, by a `Truth`, and spends it fast: decode steps in which nothing happens are one.

It keeps the Engine contract, with answers that are known beforehand: what a policy does not change is not simulated.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bus.waiting import wait
from kernels.constraint import Constraint, Logprobs
from kernels.engine import Admission, Chunk, Counts, EngineInfo, ImageRows, Prefix, Sampling, Tokens
from kernels.grouping import Member
from run.simulate.truth import Piece, Truth

_STATE = struct.Struct("<Q")


@dataclass(slots=True)
class _Request:
    num_reserved: int
    bounded_prompt: int
    num_tokens: int = 0
    num_steps: int = 0
    num_emitted: int = 0


class SimEngine:
    """One replica's. `answers`: how many tokens each request's prompt has, and its answer, which nobody else knows.

    `speed`: of its steps; `mean_accepted`: tokens a decode step yields for one request, drafts included.
    """

    def __init__(
        self,
        info: EngineInfo,
        truth: Truth,
        answers: Mapping[str, tuple[int, Tokens]],
        *,
        speed: float,
        chance: random.Random,
        mean_accepted: float = 3.0,
    ) -> None:
        self._info = info
        self._truth = truth
        self._answers = answers
        self._speed = speed
        self._chance = chance
        self._mean_accepted = mean_accepted
        self._requests: dict[str, _Request] = {}
        self._num_reserved = self._num_steps = self._num_new = 0
        self._news = asyncio.Event()
        self.busy_s = 0.0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def counts(self) -> Counts:
        """Every draft is a right one here, of those that count."""
        num_right = max(self._num_new - self._num_steps, 0)
        return Counts(num_right, self._num_steps + num_right, num_right)

    @property
    def group(self) -> Member | None:
        return None

    async def start(self) -> None:
        """There is nothing to load."""

    async def close(self) -> None:
        self._requests.clear()

    def nudge(self) -> None:
        """Something waits: decode steps that are taken as one end at the next border."""
        self._news.set()

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        if num_tokens > min(self._info.max_tokens, self._info.capacity_tokens):
            return Admission.NEVER
        if len(self._requests) >= self._info.num_slots or self._num_reserved + num_tokens > self._info.capacity_tokens:
            return Admission.LATER
        self._requests[key] = _Request(num_tokens, bounded_prompt)
        self._num_reserved += num_tokens
        return Admission.OK

    def grow(self, key: str, num_tokens: int) -> bool:
        """Steps that are taken as one go on past what is reserved: it is grown after them."""
        request = self._requests[key]
        num_more = max(0, num_tokens - request.num_reserved)
        if num_tokens > self._info.max_tokens or self._num_reserved + num_more > self._info.capacity_tokens:
            return False
        request.num_reserved += num_more
        self._num_reserved += num_more
        return True

    def attach(self, key: str, images: Sequence[ImageRows]) -> None:
        """Images take no time of their own."""

    def constrain(self, key: str, constraint: Constraint) -> None:
        """Answers are known beforehand, whatever they had to be."""

    def logprobs(self, key: str) -> list[Logprobs]:
        raise ValueError("nothing is sampled here")

    def free(self, key: str) -> None:
        if (request := self._requests.pop(key, None)) is not None:
            self._num_reserved -= request.num_reserved

    async def resume(self, key: str, prefix: Prefix) -> int:
        request = self._requests[key]
        request.num_tokens = len(prefix.tokens) - (0 if prefix.windows is not None else 128)
        return request.num_tokens

    async def blocks(self, key: str, first: int, num: int) -> list[bytes]:
        return [b""] * num

    async def windows(self, key: str, num_tokens: int) -> bytes | None:
        return b""

    async def export(self, key: str) -> bytes:
        return _STATE.pack(self._requests[key].num_tokens)

    async def restore(self, key: str, state: bytes) -> None:
        """What is behind its prompt is of its answer, from an earlier owner."""
        request = self._requests[key]
        (request.num_tokens,) = _STATE.unpack(state)
        request.num_emitted = request.num_tokens - self._answers[key][0]
        if request.num_emitted:
            request.num_steps = 1 + math.ceil((request.num_emitted - 1) / self._mean_accepted)

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        pieces = []
        for chunk in chunks:
            request, num_tokens = self._requests[chunk.key], len(chunk.tokens)
            is_last = request.num_tokens + num_tokens == request.bounded_prompt
            pieces.append(Piece(num_tokens, request.num_tokens, is_last))
            request.num_tokens += num_tokens
        took_ns = self._truth.prefill_ns(pieces) * self._truth.disturbed(self._chance) / self._speed
        self.busy_s += took_ns / 1e9
        await asyncio.sleep(took_ns / 1e9)
        return round(took_ns)

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        """As many steps as nothing happens in: the first one of a request is taken alone, and the last of one ends
        them all."""
        requests = [(self._requests[key], self._answers[key][1]) for key in keys]
        step_s = self._truth.decode_ns(len(keys)) * self._truth.disturbed(self._chance) / self._speed / 1e9
        num_steps = min(self._steps_left(request, len(answer)) for request, answer in requests)
        self._news.clear()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if num_steps > 1:
            await wait(self._news, num_steps * step_s)
            if self._news.is_set():
                num_steps = min(num_steps, max(1, math.ceil((loop.time() - began_s) / step_s - 1e-9)))
        await asyncio.sleep(began_s + num_steps * step_s - loop.time())
        self.busy_s += num_steps * step_s
        return [self._advance(request, answer, num_steps) for request, answer in requests]

    def _steps_left(self, request: _Request, num_output: int) -> int:
        if not request.num_steps:
            return 1
        return max(1, math.ceil(num_output / self._mean_accepted) + 1 - request.num_steps)

    def _advance(self, request: _Request, answer: Tokens, num_steps: int) -> list[int]:
        """The tokens of so many steps: one of the first, `mean_accepted` on average of the others."""
        request.num_steps += num_steps
        self._num_steps += num_steps
        wanted = 1 + math.floor((request.num_steps - 1) * self._mean_accepted)
        first, request.num_emitted = request.num_emitted, min(wanted, len(answer))
        tokens: list[int] = answer[first : request.num_emitted].tolist()
        if wanted > len(answer):
            tokens.append(self._info.eos_token)
        self._num_new += len(tokens)
        return tokens
