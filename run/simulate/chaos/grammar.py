"""Grammars without a language: what is allowed next depends on all of the output so far, so that a place in one that is
not the right one shows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from kernels.constraint import Bits

VOCABULARY_SIZE, END = 1000, 1
VOCABULARY = range(100, 1000)
"""Of the timed engines; END is the end-of-sequence token."""

NUM_GRAMMARS = 3
_PART = 7
"""One in so many tokens is allowed,"""

_ENDS = 60
"""and at one in so many places the end."""


def grammar(number: int) -> str:
    """As requests have it; none for 0."""
    return f"grammar {number}" if number else ""


class ChaosGrammar:
    """A `kernels.constraint.Constraint`, behind an output."""

    error = ""

    def __init__(self, text: str, output: Sequence[int] = ()) -> None:
        self._at = zlib.crc32(text.encode())
        self.accept(output)

    def allow(self, drafts: Sequence[int]) -> Bits:
        """See `Constraint`. The timed engine has no drafts."""
        assert not drafts
        return _allowed(self._at % _PART, self._at % _ENDS == 0)

    def accept(self, tokens: Sequence[int]) -> None:
        """See `Constraint`."""
        for token in tokens:
            self._at = zlib.crc32(token.to_bytes(4, "little"), self._at)


class ChaosGrammars:
    """In place of `actors.decode.grammar.Grammars`."""

    def follow(self, text: str, output: Sequence[int]) -> ChaosGrammar:
        """A grammar behind an output."""
        return ChaosGrammar(text, output)


@cache
def _allowed(part: int, may_end: bool) -> Bits:
    row = np.zeros(-(-VOCABULARY_SIZE // 32) * 32, dtype=np.uint8)
    row[[token for token in VOCABULARY if token % _PART == part]] = 1
    row[END] = may_end
    return np.packbits(row, bitorder="little").view(np.int32)[None]
