"""The names of the blocks that fill up while a request generates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.rules.chain import BLOCK_TOKENS, link
from kernels.engine import EngineInfo
from schemas.cache import ChainEnd
from schemas.handover import HandOver


class Filling:
    """Goes on with the chain of `num_prompt_tokens`, prompt and output, token by token of what follows.

    `num_done` tokens are known and in the engine's caches. See `bus.keeper.Wanted`.
    """

    def __init__(self, chain: ChainEnd, num_prompt_tokens: int, block_bytes: int) -> None:
        self.space = chain.space
        self.block_bytes = block_bytes
        self.approximate = chain.approximate
        self.num_done = num_prompt_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._keys = [chain.key]  # of the block before the first that fills here, and of those that filled
        self._tail = chain.tokens
        self._digests = chain.digests
        self._base = (num_prompt_tokens - len(chain.tokens) // 4) // BLOCK_TOKENS
        self._num_named = self._base

    @classmethod
    def of(cls, offer: HandOver, info: EngineInfo) -> Filling | None:
        """That of a request for this engine. None when nothing can be stored of it: there is no chain, it is of another
        space, or it does not end where the tokens do. Its last block may be whole, where it is not computed whole."""
        chain = offer.chain
        if chain is None or chain.space != info.space or len(chain.tokens) > 4 * BLOCK_TOKENS:
            return None
        if len(chain.tokens) % 4 or (offer.num_tokens - len(chain.tokens) // 4) % BLOCK_TOKENS:
            return None
        return cls(chain, offer.num_tokens, info.block_bytes)

    def take(self, output: Sequence[int], num_computed: int) -> bool:
        """The first `num_computed` tokens of the output, no less than before, are in the caches. Whether a block filled
        with them."""
        self.num_done = self._num_prompt_tokens + num_computed
        num_filled, number = self.num_done // BLOCK_TOKENS, self._base + len(self._keys) - 1
        for block in range(number, num_filled):
            start = block * BLOCK_TOKENS - self._num_prompt_tokens
            tokens = np.array(output[max(start, 0) : start + BLOCK_TOKENS], dtype="<u4").tobytes()
            if block == self._base:
                self._keys.append(link(self._keys[-1], self._tail + tokens, self._digests))
            else:
                self._keys.append(link(self._keys[-1], tokens))
        return num_filled > number

    def chain_end(self, output: Sequence[int]) -> ChainEnd:
        """For who goes on behind this output, of which the last token need not be in the caches yet: the blocks that
        filled here are not its own."""
        num_filled = len(self._keys) - 1
        start = max((self._base + num_filled) * BLOCK_TOKENS - self._num_prompt_tokens, 0)
        tail = np.array(output[start:], dtype="<u4").tobytes()
        return ChainEnd(
            space=self.space,
            key=self._keys[-1],
            tokens=tail if num_filled else self._tail + tail,
            digests=b"" if num_filled else self._digests,
            approximate=self.approximate,
        )

    def blocks(self, num_done: int) -> list[int]:
        """The numbers of those that filled with the first `num_done` tokens: each is named once."""
        first, self._num_named = self._num_named, max(self._num_named, num_done // BLOCK_TOKENS)
        return list(range(first, self._num_named))

    def windows(self) -> list[tuple[int, int]]:
        """(number of blocks, of tokens) behind the last two that filled here: prefill keeps those of the prompt."""
        last = self._base + len(self._keys) - 1
        return [(number, number * BLOCK_TOKENS) for number in (last, last - 1) if number > self._base]

    def key(self, number: int) -> bytes:
        """Of a block from here, or of the one before."""
        return self._keys[number - self._base + 1]
