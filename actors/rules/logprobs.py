"""The logprobs of tokens on their way: cut where messages are, and kept while they can be asked for again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kernels.constraint import Logprobs
from schemas.request import Sampling, TokenLogprobs

KEPT_TOKENS = 8192
"""Of so many tokens of a request at most (2 MB with the 20 likeliest of each); older halves are dropped."""


def message_of(found: Sequence[Logprobs]) -> TokenLogprobs:
    """What an engine said of the tokens of a step, as it travels."""
    top = [pair for one in found for pair in one.top]
    return TokenLogprobs(
        sampled=[one.sampled for one in found],
        top_tokens=[token for token, _ in top],
        top=[logprob for _, logprob in top],
    )


def cut(logprobs: TokenLogprobs, start: int, stop: int) -> TokenLogprobs:
    """Those of its tokens from `start` up to, but without `stop`."""
    if start == 0 and stop >= len(logprobs.sampled):
        return logprobs
    num_top = num_likeliest(logprobs)
    likeliest = slice(start * num_top, stop * num_top)
    return TokenLogprobs(
        sampled=logprobs.sampled[start:stop], top_tokens=logprobs.top_tokens[likeliest], top=logprobs.top[likeliest]
    )


def num_likeliest(logprobs: TokenLogprobs) -> int:
    """How many likely tokens it names with each one sampled."""
    return len(logprobs.top) // len(logprobs.sampled) if logprobs.sampled else 0


class KeptLogprobs:
    """What was said of a request's latest tokens, packed. `first`: the index of the oldest one in its output."""

    def __init__(self) -> None:
        self.first = 0
        self._num_top = 0
        self._sampled, self._top_tokens, self._top = array("d"), array("I"), array("d")

    @classmethod
    def of(cls, sampling: Sampling) -> KeptLogprobs | None:
        """For a request that asks; None for one that does not."""
        return cls() if sampling.top_logprobs >= 0 else None

    def add(self, index: int, logprobs: TokenLogprobs) -> None:
        """Those of the tokens from this index on, behind all that came before."""
        if not self._sampled:
            self.first, self._num_top = index, num_likeliest(logprobs)
        self._sampled.extend(logprobs.sampled)
        self._top_tokens.extend(logprobs.top_tokens)
        self._top.extend(logprobs.top)
        if len(self._sampled) > KEPT_TOKENS:
            num_old = len(self._sampled) - KEPT_TOKENS // 2
            self.first += num_old
            del self._sampled[:num_old]
            del self._top_tokens[: num_old * self._num_top]
            del self._top[: num_old * self._num_top]

    def get(self, start: int, stop: int) -> TokenLogprobs:
        """Those of the tokens from index `start`, `first` or later, up to, but without `stop`."""
        some = slice(start - self.first, stop - self.first)
        likeliest = slice(some.start * self._num_top, some.stop * self._num_top)
        return TokenLogprobs(
            sampled=self._sampled[some].tolist(),
            top_tokens=self._top_tokens[likeliest].tolist(),
            top=self._top[likeliest].tolist(),
        )
