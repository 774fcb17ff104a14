"""The block ids of a paged pool: which are taken; no memory, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.engine import BLOCK_TOKENS, Admission


def num_blocks_of(num_tokens: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // BLOCK_TOKENS)


class PoolFull(RuntimeError):
    """There is no room now."""


class PagePool:
    """Blocks 1 to `num_blocks`, each free or taken. Id 0 is never handed out: it means "no block"."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, num: int) -> Admission:
        """Whether `take` would give `num` blocks: now, later, or never, not even from an empty pool."""
        if num > self.num_blocks:
            return Admission.NEVER
        return Admission.OK if num <= len(self._free) else Admission.LATER

    def take(self, num: int) -> list[int]:
        """`num` blocks. Raises PoolFull; then none was taken."""
        if self.admit(num) is not Admission.OK:
            raise PoolFull(f"{num} blocks are wanted, {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(num)]
        self._taken.update(taken)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Raises ValueError, and changes nothing, unless all are taken: a block must not come to have two owners."""
        if len(set(blocks)) != len(blocks) or not self._taken.issuperset(blocks):
            raise ValueError(f"not all of the blocks {list(blocks)} are taken")
        self._taken.difference_update(blocks)
        self._free += blocks
