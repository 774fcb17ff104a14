"""A request of a workload: when it comes, how long it is, and which blocks its prompt shares with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.rules.chain import BLOCK_TOKENS

VOCABULARY_BITS = 17
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `blocks` has an id (below 2^64) for each block of 128 tokens that its prompt begins, the last one
    as a rule not complete: ceil(num_tokens / 128) of them.

    Prompts share a prefix exactly where their ids are equal from the first one on. `more`: the ids of the blocks that
    prompt and answer begin together, from where `blocks` ends, when a later prompt goes on from the answer.
    """

    at_s: float
    num_tokens: int
    num_output: int
    blocks: tuple[int, ...]
    tenant: str = ""
    more: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_output < 1 or len(self.blocks) != num_blocks(self.num_tokens):
            raise ValueError(f"{self.num_tokens} tokens, {self.num_output} of output, {len(self.blocks)} blocks")

    def tokens(self) -> npt.NDArray[np.uint32]:
        """The prompt, [num_tokens] uint32: worked out anew each time."""
        return tokens_of(self.blocks)[: self.num_tokens]

    def answer(self) -> npt.NDArray[np.uint32]:
        """The answer, [num_output] uint32: as a later prompt has it; zeros where none has."""
        if num_blocks(self.num_tokens + self.num_output) != len(self.blocks) + len(self.more):
            return np.zeros(self.num_output, np.uint32)
        start = self.num_tokens % BLOCK_TOKENS
        blocks = self.blocks[-1:] + self.more if start else self.more
        return tokens_of(blocks)[start : start + self.num_output]


def num_blocks(num_tokens: int) -> int:
    """How many blocks so many tokens begin."""
    return -(-num_tokens // BLOCK_TOKENS)


def tokens_of(blocks: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Tokens of a vocabulary of 131,072, 128 a block, [128 x blocks] uint32; a block's follow from its id alone, so
    that chains of hashes meet exactly where ids do.

    Each block's is an arithmetic progression whose 63 bits of start and step are drawn from the id: what tells blocks
    apart is all that is asked, at 145 million tokens a trace.
    """
    drawn = np.array(blocks, dtype=np.uint64)
    for shift in (30, 27):  # the rounds of splitmix64, which is a bijection
        drawn = (drawn ^ (drawn >> np.uint64(shift))) * _GOLDEN
    drawn ^= drawn >> np.uint64(31)
    step = (drawn >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    tokens = np.multiply.outer(step, np.arange(BLOCK_TOKENS, dtype=np.uint32))
    tokens += drawn.astype(np.uint32)[:, None]
    tokens >>= np.uint32(32 - VOCABULARY_BITS)
    flat: npt.NDArray[np.uint32] = tokens.reshape(-1)
    return flat
