"""What each request is answered when nothing goes wrong: the timed engine's tokens, without a system around it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

from actors.rules.load import promised_tokens
from kernels import engine
from kernels.engine import Chunk, EngineInfo, ImageRows, Tokens
from kernels.timed import StepCost, TimedEngine
from run.simulate.chaos.grammar import END, VOCABULARY, VOCABULARY_SIZE, ChaosGrammar, grammar
from run.simulate.chaos.images import TOKEN, seen
from run.simulate.chaos.script import Ask, Shape
from run.simulate.ranks import Crew, Grouped
from schemas.request import Finished, FinishReason

T = TypeVar("T")

MAX_TOKENS = 2048
"""Of prompt and output."""

MEAN_OUTPUT = 400
BETWEEN = 100
"""Tokens of text in front of each image."""

NUM_SLOTS = 4
PREFILL_TOKENS = 4096
PREFILL_COST = StepCost(step_ns=20_000_000, prefill_token_ns=100_000)


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole output, the logprob of each token where they are asked for, and why it ends."""

    tokens: list[int]
    logprobs: list[float]
    end: Finished


class ChaosEngine(TimedEngine):
    """A timed engine that can become slow, and hang."""

    def __init__(self, num_slots: int, capacity_tokens: int, cost: StepCost, most_accepted: int = 1) -> None:
        super().__init__(info(num_slots, capacity_tokens), VOCABULARY, cost, MEAN_OUTPUT, most_accepted)
        self._usual = cost
        self._num_hung = 0
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    def hang(self) -> None:
        """From the next step on none ends, until `go_on` was called as often."""
        self._num_hung += 1
        self._goes_on.clear()

    def go_on(self) -> None:
        """See above."""
        self._num_hung -= 1
        if not self._num_hung:
            self._goes_on.set()

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        """See `Engine`."""
        spent_ns = await super().prefill(chunks)
        await self._stay()
        return spent_ns

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        """See `Engine`."""
        tokens = await super().decode(keys)
        await self._stay()
        return tokens

    async def _stay(self) -> None:
        await self._goes_on.wait()

    def slow(self, factor: float) -> None:
        """From the next step on, so many times its usual cost."""
        usual = self._usual
        self._cost = StepCost(
            int(usual.step_ns * factor), int(usual.prefill_token_ns * factor), int(usual.decode_row_ns * factor)
        )

    def reserved(self) -> dict[str, int]:
        """Tokens of room that each request has in it."""
        return {id: request.num_reserved for id, request in self._requests._requests.items()}


class ChaosRank(Grouped, ChaosEngine):
    """One that steps with the others of its group."""


def decode_engine(shape: Shape, crew: Crew | None, rank: int) -> ChaosEngine:
    """One of a decode replica."""
    cost = StepCost(step_ns=shape.step_ms * 1_000_000, decode_row_ns=1_000_000)
    return _engine(crew, rank, NUM_SLOTS, shape.decode_tokens, cost, shape.most_accepted)


def prefill_engine(crew: Crew | None, rank: int) -> ChaosEngine:
    """One of a prefill replica."""
    return _engine(crew, rank, NUM_SLOTS, PREFILL_TOKENS, PREFILL_COST)


def _engine(crew: Crew | None, rank: int, *args: Any) -> ChaosEngine:
    return ChaosEngine(*args) if crew is None else ChaosRank(crew, rank, *args)


def info(num_slots: int, capacity_tokens: int) -> EngineInfo:
    """All engines of a simulation are of one model."""
    return EngineInfo(
        model="timed",
        layout="timed",
        vocab_size=VOCABULARY_SIZE,
        eos_token=END,
        max_tokens=MAX_TOKENS,
        num_slots=num_slots,
        max_step_tokens=512,
        capacity_tokens=capacity_tokens,
        space="timed",
        block_bytes=64,
    )


def prompt(ask: Ask) -> tuple[Tokens, list[int]]:
    """Its tokens, and where in them its images begin. But for those, what it begins with is what any other of its text
    begins with."""
    text, parts, starts = _text(ask.text)[: ask.num_tokens], list[Tokens](), list[int]()
    for number, image in enumerate(ask.images):
        num_tokens, _ = seen(image)
        parts.append(text[number * BETWEEN : (number + 1) * BETWEEN])
        starts.append(sum(map(len, parts)))
        parts.append(np.full(num_tokens, TOKEN, "<u4"))
    return np.concatenate([*parts, text[len(ask.images) * BETWEEN :]]), starts


@cache
def _text(number: int) -> Tokens:
    return np.random.default_rng(number).integers(100, 900, MAX_TOKENS).astype("<u4")


def answers(asks: Sequence[Ask]) -> dict[str, Answer]:
    """Of all of them, by id."""
    alone = ChaosEngine(len(asks) + 1, (len(asks) + 1) * promised_tokens(MAX_TOKENS), StepCost(), 32)
    return {ask.id: _now(_answer(alone, ask)) for ask in asks}


async def _answer(alone: TimedEngine, ask: Ask) -> Answer:
    tokens, logprobs, reason = list[int](), list[float](), FinishReason.LENGTH
    tokens_in, starts = prompt(ask)
    room = min(ask.max_tokens, MAX_TOKENS - len(tokens_in))
    sampling = engine.Sampling(ask.temperature, 1.0, ask.seed, top_logprobs=ask.top_logprobs)
    alone.admit(ask.id, len(tokens_in) + room, sampling)
    if ask.images:
        rows = [seen(image)[1] for image in ask.images]
        alone.attach(ask.id, [ImageRows(*one) for one in zip(starts, rows, strict=True)])
    await alone.prefill([Chunk(ask.id, tokens_in)])
    if ask.grammar:
        alone.constrain(ask.id, ChaosGrammar(grammar(ask.grammar)))
    while len(tokens) < room and reason is FinishReason.LENGTH:
        (new,) = await alone.decode([ask.id])
        told = alone.logprobs(ask.id) if ask.top_logprobs >= 0 else []
        for number, token in enumerate(new[: room - len(tokens)]):
            if token == alone.info.eos_token:
                reason = FinishReason.STOP
                break
            tokens.append(token)
            logprobs += [told[number].sampled] if told else []
    alone.free(ask.id)
    return Answer(tokens, logprobs, Finished(reason=reason))


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of what waits for nothing but its next turn."""
    while True:
        try:
            work.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
