"""What of a prompt is worth keeping for others: blocks that are not stored yet, windows where others will go on."""

from __future__ import annotations

from collections.abc import Sequence

from actors.prefill.restore import NOTHING, Fetched, Restored, keys
from actors.rules.chain import BLOCK_TOKENS
from actors.rules.location import approximate, words
from kernels.engine import Tokens
from schemas.cache import CachedPrefix, ChainEnd


class Keeping:
    """Of one prompt, under the keys of `prefix`, in which nothing is restored unless `settle` says otherwise.

    `branches`: so many tokens others are likely to begin with, too (`schemas.request.Submit`).
    """

    def __init__(
        self, prefix: CachedPrefix, tokens: Tokens, block_bytes: int = 0, branches: Sequence[int] = ()
    ) -> None:
        self.prefix = prefix
        self.space = prefix.space
        self.block_bytes = block_bytes
        self._tokens = tokens
        self._branches = branches
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
        is_there = ~approximate(words(self.prefix.locations)) | restored.approximate
        self._present = set(is_there.nonzero()[0].tolist()) - self._bad
        self._cuts = self._where_to_cut()
        self._kept: set[int] = set()

    def blocks(self, num_done: int) -> list[int]:
        """The numbers of those to be stored of the first `num_done` tokens: each is named once."""
        first, self._num_seen = self._num_seen, max(self._num_seen, num_done // BLOCK_TOKENS)
        return [number for number in range(first, self._num_seen) if number not in self._present]

    def key(self, number: int) -> bytes:
        """Of a block; that before the first one is the root."""
        return keys(self.prefix, number, number + 1)[0] if number >= 0 else self.prefix.root

    def cut(self, num_done: int, num_tokens: int) -> int:
        """How many of the next `num_tokens` to compute at once, so that all windows to be kept can be read."""
        for end in (number * BLOCK_TOKENS for number in self._cuts):
            if num_done < end <= num_done + num_tokens - BLOCK_TOKENS:
                return end - num_done
        return num_tokens

    def windows(self, num_done: int) -> list[tuple[int, int]]:
        """(number of blocks, of tokens) behind which to keep windows when `num_done` tokens are computed, each once:
        where another prompt will look for them, whether it is the same, goes on from this one or branches off.

        Only the last two block ends can be read, and both are wanted: a prompt that ends less than a block behind a
        block end looks for the windows before it (`actors.rules.hit`).
        """
        last = num_done // BLOCK_TOKENS
        is_whole = num_done == len(self._tokens)
        found = [
            (number, number * BLOCK_TOKENS)
            for number in (last, last - 1)
            if number * BLOCK_TOKENS > self._start
            and number not in self._kept
            and (is_whole or number in self._cuts or number + 1 in self._cuts)
        ]
        self._kept.update(number for number, _ in found)
        return found

    def _where_to_cut(self) -> list[int]:
        """Behind how many blocks chunks have to end: at each branch, unless all who branch off there find windows
        anyway, at the end of this prompt or of another branch. If it goes on from behind the first branch, this is a
        conversation that is known, and nothing is worth another step."""
        if not self._branches or self._start > self._branches[0]:
            return []
        last, cuts = len(self._tokens) // BLOCK_TOKENS, list[int]()
        for number in (branch // BLOCK_TOKENS for branch in self._branches):
            needed = max(number - 1, 1)  # with these alone every hit is exact; with the next, many are a block longer
            is_there = needed * BLOCK_TOKENS <= self._start or needed >= last - 1
            if number > 0 and not is_there and not {needed, needed + 1} & set(cuts):
                cuts.append(number)
        return cuts

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
