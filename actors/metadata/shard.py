"""A slice, by key, of where all blocks are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from actors.rules import keys as block_keys
from actors.rules import location
from actors.rules.blocks import BlockTable, Flags, Keys, Values


class Shard:
    """The locations of those blocks that the shard `id` owns among `members`, itself always one of them."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.members = [id]
        self._table = BlockTable()

    @property
    def num_blocks(self) -> int:
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Memory of the table, free room included."""
        return self._table.size_bytes

    def set_members(self, others: Sequence[str]) -> bool:
        """Who else there is. True if there may be more of ours now: someone left."""
        before, self.members = self.members, sorted({self.id, *others})
        return bool(set(before) - set(self.members))

    def shed(self) -> Iterator[None]:
        """Forget, step by step, what is another's now."""
        return self._table.sweep(lambda keys, _: ~self.owns(keys))

    def owns(self, keys: Keys) -> Flags:
        """Which of these are ours."""
        ours: Flags = block_keys.owners(keys, self.members) == self.members.index(self.id)
        return ours

    def find(self, keys: Keys) -> Values:
        """The locations of those before the first that is not here."""
        values, there = self._table.find(keys)
        return values[: len(keys) if there.all() else int(there.argmin())]

    def put(self, keys: Keys, locations: Values) -> None:
        """Blocks are there; those of other shards are passed over. An approximate one does not hide an exact one."""
        ours = self.owns(keys)
        keys, locations = keys[ours], locations[ours]
        known, there = self._table.find(keys)
        is_worse = there & ~location.approximate(known) & location.approximate(locations)
        self._table.put(keys[~is_worse], locations[~is_worse])

    def drop(self, keys: Keys, locations: Values) -> None:
        """Blocks are no longer at these locations; those known to be elsewhere stay."""
        self._table.remove(keys, locations)

    def clear(self, slabs: Sequence[int]) -> Iterator[None]:
        """Forget, step by step, all that is in these slabs."""
        numbers = np.array(slabs, dtype=np.uint64)
        return self._table.sweep(lambda _, locations: np.isin(location.slabs(locations), numbers))
