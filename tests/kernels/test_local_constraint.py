"""Constraints, early ends and logprobs: the same with drafts and without."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kernels.constraint import Bits, Logprobs
from kernels.engine import Chunk, Sampling
from kernels.local import LocalEngine
from tests.conftest import Run
from tests.kernels.test_local_drafts import engine, tokens

NUM_NEW = 16
WORDS = 8  # of the 256 tokens of the checkpoint
END = 1


class Steps:
    """Behind token t only tokens of the residue (t + 1) mod 3, and none below 3; the end after `length` tokens."""

    def __init__(self, length: int = 1000) -> None:
        self.tokens: list[int] = []
        self._length = length

    def allow(self, drafts: Sequence[int]) -> Bits:
        rows: list[Bits] = []
        for place in range(len(drafts) + 1):
            known = [*self.tokens, *drafts[:place]]
            if place and not self._allowed(known[:-1])[known[-1]]:
                break
            packed = np.packbits(self._allowed(known), bitorder="little").view(np.int32)
            rows.append(packed)
        return np.stack(rows)

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert self._allowed(self.tokens)[token]
            self.tokens.append(token)

    def _allowed(self, known: Sequence[int]) -> np.ndarray:
        allowed = np.zeros(32 * WORDS, dtype=bool)
        if len(known) >= self._length:
            allowed[END] = True
        else:
            allowed[3 + (known[-1] + 1 if known else 0) % 3 :: 3] = True
        return allowed


class Stuck:
    """Cannot say what is allowed."""

    def allow(self, drafts: Sequence[int]) -> Bits:
        return np.empty((0, WORDS), dtype=np.int32)

    def accept(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing was sampled")


SAMPLINGS = {
    "free": Sampling(0.0, 1.0, 0, top_logprobs=2),
    "greedy": Sampling(0.0, 1.0, 0, top_logprobs=0),
    "hot": Sampling(30.0, 1.0, 2**63 - 1, top_logprobs=3),
    "late": Sampling(0.0, 1.0, 0, first_end=10**6, logit_bias=tuple((token, 1e4) for token in range(9, 12))),
}


async def generate(local: LocalEngine) -> tuple[dict[str, list[int]], dict[str, list[Logprobs]], int]:
    """Tokens, logprobs, and how often a request took part in a step."""
    await local.start()
    for name, sampling in SAMPLINGS.items():
        local.admit(name, 20 + NUM_NEW, sampling)
        if name != "free":
            local.constrain(name, Steps())
    await local.prefill([Chunk(name, tokens(20, place)) for place, name in enumerate(SAMPLINGS)])
    new: dict[str, list[int]] = {name: [] for name in SAMPLINGS}
    told: dict[str, list[Logprobs]] = {name: [] for name in SAMPLINGS}
    num_rows = 0
    while running := [name for name in SAMPLINGS if len(new[name]) < NUM_NEW]:
        num_rows += len(running)
        for name, found in zip(running, await local.decode(running), strict=True):
            new[name] += found
            if name != "late":
                told[name] += local.logprobs(name)
                assert len(told[name]) == len(new[name])
    with pytest.raises(ValueError, match="asked for no logprobs"):
        local.logprobs("late")
    await local.close()
    for found in (new, told):
        for name in SAMPLINGS:
            del found[name][NUM_NEW:]  # the last step may have given more
    return new, told, num_rows


def test_what_is_allowed_and_told_is_the_same_with_drafts(run_debug: Run) -> None:
    async def main() -> None:
        plain, plain_told, most = await generate(engine(drafts="off"))
        new, told, fewer = await generate(engine())
        assert (new, told) == (plain, plain_told)
        assert fewer < most
        for name in ("greedy", "hot", "late"):
            assert len({(token - place) % 3 for place, token in enumerate(new[name])}) == 1
        assert new["late"] == [9 + place % 3 for place in range(NUM_NEW)], "whatever the model says"
        for name, num_top in (("free", 2), ("greedy", 0), ("hot", 3)):
            for token, one in zip(new[name], told[name], strict=True):
                assert len(one.top) == num_top
                assert one.top == sorted(one.top, key=lambda pair: -pair[1])
                assert one.sampled <= 0
                if name == "free":  # greedy: the likeliest
                    assert one.top[0] == (token, one.sampled)
        assert sum(map(math.exp, (value for _, value in told["hot"][0].top))) < 1

    run_debug(main())


def test_a_constraint_that_ends_lets_an_early_end_pass_and_else_it_comes_when_it_may(run_debug: Run) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        local.admit("r", 40, Sampling(0.0, 1.0, 0, first_end=10**6))
        local.constrain("r", constraint := Steps(length=3))
        local.admit("s", 40, Sampling(0.0, 1.0, 0, first_end=20 + 3, logit_bias=((END, 1e4),)))
        for name in "rs":
            await local.prefill([Chunk(name, tokens(20))])
            new: list[int] = []
            while END not in new:
                new += (await local.decode([name]))[0]
            assert new.index(END) == 3
            if name == "r":
                assert constraint.tokens[:4] == new[:4]
        await local.close()

    run_debug(main())


def test_a_constraint_that_cannot_go_on_ends_its_request_alone(run_debug: Run) -> None:
    async def main() -> None:
        local = engine()
        await local.start()
        for name in "ab":
            local.admit(name, 40, Sampling(0.0, 1.0, 0))
        await local.prefill([Chunk("a", tokens(20)), Chunk("b", tokens(20))])
        (alone,) = await local.decode(["a"])
        local.constrain("b", Stuck())
        other, none = await local.decode(["a", "b"])
        assert alone
        assert other
        assert none == []
        await local.close()

    run_debug(main())
