"""The block ids of a paged pool: who holds which, counted; no memory, no tensors."""

from __future__ import annotations

from kernels.engine import Admission


class PoolFull(RuntimeError):
    """There is no room now."""


class PagePool:
    """Blocks 1 to `num_blocks`, each with the number of its holders. Id 0 is never handed out: it means "no block".

    Giving back what is not held, and holding what nobody holds, are ValueErrors: a block must not have two owners who
    do not know of each other.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        self.num_blocks = num_blocks
        self._holders = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, num: int) -> Admission:
        """Whether `take` would give `num` blocks: now, later, or never, not even from an empty pool."""
        if num > self.num_blocks:
            return Admission.NEVER
        return Admission.OK if num <= len(self._free) else Admission.LATER

    def take(self, num: int) -> list[int]:
        """`num` blocks, each with one holder. Raises PoolFull; then none was taken."""
        if self.admit(num) is not Admission.OK:
            raise PoolFull(f"{num} blocks are wanted, {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(num)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Count one more holder of a block that is held."""
        self._need(block)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less; the last one's block is free again."""
        self._need(block)
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def _need(self, block: int) -> None:
        if not 0 < block <= self.num_blocks or not self._holders[block]:
            raise ValueError(f"block {block} is not held")
