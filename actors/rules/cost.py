"""How long prefill takes, in nanoseconds, from counts alone (design §5).

    cost = a + b (q + r) + g [(q + r)(c - r) + (q + r)² / 2] + d blocks

for q tokens to compute behind c cached ones of which r are replayed, and so many blocks to load. Computed behind c - r
tokens, q + r of them see (q + r)(c - r) + (q + r)² / 2 pairs.

That is what is published. Measured, three terms more are needed; they are zero where they are not known:

- the last window of a bounded prompt, which alone passes the decoder layers and sees the whole context there: so much
  for each of its tokens, and for each pair. An exact prompt is one whose last window is all of it, nothing else;
- a step has its context at hand: so much for each token of it. A prompt of many steps pays that, and `a`, in each, so a
  cost says how many tokens a step computes at most (`step_tokens`).

`shoal bench cost` says how far off that is, and how far the bare quadratic.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
"""Of weeding out outliers: each takes away the worst."""

_OUTLIER = 3.0
"""So many times the median residual is no measurement of this,"""

_NO_OUTLIER = 0.1
"""unless it is less than that: few samples fit by chance, and those that do not are as good."""

STEP_NS = 200e6
"""How long a step of prefill may take, so that it is known how long who comes waits for one that is under way. A step
of the published model takes 37 ms before its first token: with more steps a long prompt gives away more than a fifth of
its time, with longer ones chat waits. On a laptop a step is as long as decode goes without the cores they share."""

WINDOW = 128
"""Tokens of a prompt's end that every layer computes (spec model.md: bounded replay)."""


class Terms(NamedTuple):
    """What each coefficient of a `Cost` is multiplied with, in its order. Those of one step add up, `steps` aside."""

    steps: float = 1.0
    tokens: float = 0.0
    pairs: float = 0.0
    blocks: float = 0.0
    tail_tokens: float = 0.0
    tail_pairs: float = 0.0
    context: float = 0.0


class Work(NamedTuple):
    """What is to be done for one prompt, to its end; counts of tokens, and of blocks. `is_exact`: all layers compute
    all tokens."""

    num_new: int
    num_cached: int = 0
    num_replayed: int = 0
    num_blocks: int = 0
    is_exact: bool = False

    def terms(self, step_tokens: int = 0) -> Terms:
        """Of all of it, in steps of its own of so many tokens, the last one shorter; 0: in one step."""
        num_tokens, start = self.num_new + self.num_replayed, self.num_cached - self.num_replayed
        whole = chunk_terms(num_tokens, start, is_exact=self.is_exact)
        num_before = max(0, num_tokens - 1) // step_tokens if step_tokens else 0
        return whole._replace(
            steps=1 + num_before,
            blocks=self.num_blocks,
            context=whole.context + num_before * start + step_tokens * num_before * (num_before + 1) / 2,
        )


def chunk_terms(num_tokens: int, num_done: int, num_behind: int = 0, *, is_exact: bool = False) -> Terms:
    """Of a step that computes the next `num_tokens` of one prompt, of which `num_done` are, and `num_behind` follow.
    `is_exact`: see `Work`."""
    end = num_done + num_tokens
    pairs = num_tokens * num_done + num_tokens * num_tokens / 2
    tail = num_tokens if is_exact else max(0, min(num_tokens, WINDOW - num_behind))
    return Terms(
        tokens=num_tokens,
        pairs=pairs,
        tail_tokens=tail,
        tail_pairs=tail * (end - tail / 2),
        context=end,
    )


def step_terms(chunks: Sequence[Terms]) -> Terms:
    """Of one step that computes all of these."""
    return Terms(1.0, *(sum(column) for column in list(zip(*chunks, strict=True))[1:]))


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients in nanoseconds: of a step, a token, a pair of tokens, a block to load; of a token of the last window
    and of a pair of these with what they see; of a token of context. `step_tokens`: the most that a step computes, 0
    if there is no limit."""

    step_ns: float
    token_ns: float
    pair_ns: float
    block_ns: float
    tail_token_ns: float = 0.0
    tail_pair_ns: float = 0.0
    context_ns: float = 0.0
    step_tokens: float = 0.0

    def work_ns(self, work: Work) -> float:
        """The time of a whole prompt that is computed alone."""
        return self.ns(work.terms(int(self.step_tokens)))

    def ns(self, terms: Terms) -> float:
        """The time of this."""
        return (
            self.step_ns * terms.steps
            + self.token_ns * terms.tokens
            + self.pair_ns * terms.pairs
            + self.block_ns * terms.blocks
            + self.tail_token_ns * terms.tail_tokens
            + self.tail_pair_ns * terms.tail_pairs
            + self.context_ns * terms.context
        )

    def most_tokens(self, room_ns: float, num_done: int) -> int:
        """The most tokens behind `num_done` whose computing adds at most `room_ns` to a step; not negative."""
        half_pair = self.pair_ns / 2
        linear = self.token_ns + self.pair_ns * num_done + self.context_ns
        room = room_ns - self.context_ns * num_done
        if room <= 0:
            return 0
        if linear == half_pair == 0:
            return sys.maxsize  # an engine that takes no time
        # The positive root, in the form that does not cancel.
        return int(2 * room / (linear + (linear * linear + 4 * half_pair * room) ** 0.5))


PUBLISHED = Cost(step_ns=36.7e6, token_ns=50.5e3, pair_ns=0.134, block_ns=0.0)
"""Of the real model on eight H100 (spec serving.md §3, K4). What loading takes is not published."""


def fit(samples: Sequence[tuple[Terms, float]]) -> Cost:
    """The coefficients, none of them negative, that fit measured (terms, nanoseconds) best. Errors count relative to
    the time: a short prompt matters as much as a long one.

    Measurements that are far off are left out. Raises ValueError when there is none.
    """
    if not samples:
        raise ValueError("nothing to fit")
    terms = np.array([terms for terms, _ in samples], dtype=np.float64)
    took_ns = np.array([max(took, 1) for _, took in samples], dtype=np.float64)
    relative, kept = terms / took_ns[:, None], np.ones(len(samples), dtype=bool)
    found = _least_squares(relative)
    for _ in range(_ROUNDS):
        left = np.abs(relative @ found - 1)
        is_good = left <= max(_OUTLIER * float(np.median(left)), _NO_OUTLIER)
        if (is_good == kept).all() or is_good.sum() < 4:
            break
        kept = is_good
        found = _least_squares(relative[kept])
    return Cost(*(float(one) for one in found))


def _least_squares(relative: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The x >= 0 with `relative` x nearest to one everywhere: terms that would be negative are left out, the worst
    first. Few terms, so no solver is called for."""
    used = [number for number in range(relative.shape[1]) if relative[:, number].any()]
    found = np.zeros(relative.shape[1])
    while used:
        scale = relative[:, used].max(0)
        solved = np.linalg.lstsq(relative[:, used] / scale, np.ones(len(relative)), rcond=None)[0] / scale
        worst = int((solved * scale).argmin())
        if solved[worst] >= 0:
            found[used] = solved
            break
        del used[worst]
    return found
