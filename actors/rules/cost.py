"""How long prefill takes, in nanoseconds, from counts alone (design §5).

    cost = a + b (q + r) + g [(q + r)(c - r) + (q + r)² / 2] + d blocks

for q tokens to compute behind c cached ones of which r are replayed, and so many blocks to load. Computed behind c - r
tokens, q + r of them see (q + r)(c - r) + (q + r)² / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
"""Of weeding out outliers: each takes away the worst."""

_OUTLIER = 3.0
"""So many times the median residual is no measurement of this."""


class Work(NamedTuple):
    """What is to be done for one prompt; counts of tokens, and of blocks."""

    num_new: int
    num_cached: int = 0
    num_replayed: int = 0
    num_blocks: int = 0

    def terms(self) -> tuple[float, float, float, float]:
        """What a, b, g and d are multiplied with."""
        computed = self.num_new + self.num_replayed
        pairs = computed * (self.num_cached - self.num_replayed) + computed * computed / 2
        return 1.0, float(computed), pairs, float(self.num_blocks)


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients in nanoseconds: of a request, a token, a pair of tokens, a block to load."""

    request_ns: float
    token_ns: float
    pair_ns: float
    block_ns: float

    def ns(self, work: Work) -> int:
        """The time of this work."""
        request, tokens, pairs, blocks = work.terms()
        return round(
            self.request_ns * request + self.token_ns * tokens + self.pair_ns * pairs + self.block_ns * blocks
        )


PUBLISHED = Cost(request_ns=36.7e6, token_ns=50.5e3, pair_ns=0.134, block_ns=0.0)
"""Of the real model on eight H100 (spec serving.md §3, K4). What loading takes is not published."""


def fit(samples: Sequence[tuple[Work, int]]) -> tuple[Cost, float]:
    """The coefficients, none of them negative, that fit measured (work, nanoseconds) best, and the median of what is
    left, as a part of the measured. Errors count relative to the time: a short prompt matters as much as a long one.

    Measurements that are far off are left out. Raises ValueError when there is none.
    """
    if not samples:
        raise ValueError("nothing to fit")
    terms = np.array([work.terms() for work, _ in samples])
    took_ns = np.array([max(took, 1) for _, took in samples], dtype=np.float64)
    relative, kept = terms / took_ns[:, None], np.ones(len(samples), dtype=bool)
    found = _least_squares(relative)
    for _ in range(_ROUNDS):
        left = np.abs(relative @ found - 1)
        is_good = left <= max(_OUTLIER * float(np.median(left)), 1e-9)
        if (is_good == kept).all() or is_good.sum() < 4:
            break
        kept = is_good
        found = _least_squares(relative[kept])
    residual = float(np.median(np.abs(relative @ found - 1)))
    return Cost(*(float(one) for one in found)), residual


def _least_squares(relative: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The x >= 0 with `relative` x nearest to one everywhere: terms that would be negative are left out, the worst
    first. Four terms, so no solver is called for."""
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
