"""What the next tokens of a request may be, and how likely the model took them for. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]


class Logprobs(NamedTuple):
    """Natural logarithms of the probabilities that the model gives at one position: before temperature, masks and
    top-p. `sampled` is that of the token sampled, `top` (token, its own) of the likeliest ones, likeliest first."""

    sampled: float
    top: list[tuple[int, float]]


class Constraint(Protocol):
    """What the next tokens of a request may be. The engine asks in its steps, from its own thread."""

    def allow(self, drafts: Sequence[int]) -> Bits:
        """The tokens allowed next, and behind each of `drafts`: int32 [1 + n, words], bit t % 32 of word t // 32 for
        token t. n is less than there are drafts where one is not allowed: it and those behind it are left out.
        Nothing changes. No rows at all: it cannot say, and the request cannot go on.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """These were sampled: the first one allowed next, and so on."""
        ...
