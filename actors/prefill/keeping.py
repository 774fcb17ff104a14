"""What of a prompt is worth keeping for others: blocks that are not stored yet, windows at its end."""

from __future__ import annotations

from actors.prefill.restore import NOTHING, Fetched, Restored, keys
from actors.rules.chain import BLOCK_TOKENS
from actors.rules.location import words
from kernels.engine import Tokens
from schemas.cache import CachedPrefix, ChainEnd


class Keeping:
    """Of one prompt, under the keys of `prefix`, in which nothing is restored unless `settle` says otherwise."""

    def __init__(self, prefix: CachedPrefix, tokens: Tokens, block_bytes: int = 0) -> None:
        self.prefix = prefix
        self.space = prefix.space
        self.block_bytes = block_bytes
        self._tokens = tokens
        self._bad: set[int] = set()
        self.settle(NOTHING)

    def settle(self, restored: Restored, fetched: Fetched | None = None) -> None:
        """It has turned out what is restored. What was said to be there, and could not be had, is to be kept anew; so
        is what is approximate there when this prompt is not."""
        if fetched is not None:
            self._bad.update(*fetched.bad().values())
        self.approximate = restored.approximate
        self._start = restored.hit.start
        self._num_seen = restored.hit.num_blocks
        is_there = (words(self.prefix.locations) & 1 == 0) | restored.approximate
        self._present = set(is_there.nonzero()[0].tolist()) - self._bad

    def blocks(self, num_done: int) -> list[int]:
        """The numbers of those to be stored of the first `num_done` tokens: each is named once."""
        first, self._num_seen = self._num_seen, max(self._num_seen, num_done // BLOCK_TOKENS)
        return [number for number in range(first, self._num_seen) if number not in self._present]

    def key(self, number: int) -> bytes:
        """Of a block; that before the first one is the root."""
        return keys(self.prefix, number, number + 1)[0] if number >= 0 else self.prefix.root

    def windows(self) -> list[tuple[int, int]]:
        """(number of blocks, of tokens) behind which to keep the windows, when the whole prompt is computed: where the
        next prompt will look for them, whether it is the same or goes on from this one."""
        last = len(self._tokens) // BLOCK_TOKENS
        ends = [(number, number * BLOCK_TOKENS) for number in (last, last - 1)]
        return [(number, end) for number, end in ends if end > self._start]

    def chain(self) -> ChainEnd:
        """Where decode goes on."""
        last = len(self._tokens) // BLOCK_TOKENS
        return ChainEnd(
            space=self.prefix.space,
            key=self.key(last - 1),
            tokens=self._tokens[last * BLOCK_TOKENS :].astype("<u4").tobytes(),
            digests=self.prefix.digests,
            approximate=self.approximate,
        )
