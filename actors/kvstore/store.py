"""All blocks that there are, and which of them are to be dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from actors.kvstore.reclaim import Reclaim
from actors.rules import location
from actors.rules.blocks import BlockTable, Flags, Keys, Values
from actors.rules.writers import Writers

AT_ONCE = 4096
"""Blocks of a dump that are taken over in one step."""

EXTRA = 4
"""So many blocks may go for each that a writer needs: the oldest may all be in slabs of others."""


class Store:
    """The blocks of all writers in the order of their last use, and what is to be told to whom.

    `drops` gathers, for each writer, blocks to be freed, as keys and locations; whoever sends them empties it.
    """

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self.reclaim = Reclaim()
        self.drops: dict[str, list[tuple[Keys, Values]]] = {}
        self.num_reclaimed = 0
        self.num_duplicates = 0

    def stored(self, writer: str, keys: Keys, parents: Keys, locations: Values, now_s: float) -> None:
        """A writer has these. Where another has one too, the older goes, or the approximate one if one is exact.

        What one writer has twice it sees to itself.
        """
        self._writers.claim(writer, np.unique(location.slabs(locations)).tolist())
        known, there = self.reclaim.find(keys)
        for_known = there & ~location.approximate(known) & location.approximate(locations)
        elsewhere = there & (known != locations)
        for place, is_worse in ((locations, elsewhere & for_known), (known, elsewhere & ~for_known)):
            others = [
                number
                for number in np.flatnonzero(is_worse).tolist()
                if self._owner(int(known[number])) != writer
            ]
            self.num_duplicates += len(others)
            self._drop(keys[others], place[others])
        new = ~for_known
        self.reclaim.stored(keys[new], parents[new], locations[new], now_s)

    def replace(
        self, writer: str, slabs: Sequence[int], keys: Keys, parents: Keys, locations: Values, now_s: float
    ) -> Iterator[None]:
        """What a writer's dump says is all it has, step by step. Those known already are none the younger for it."""
        had_keys, had_locations = self.reclaim.inside(self._writers.settle(writer, slabs))
        yield
        dump = BlockTable()
        for start in range(0, len(keys), AT_ONCE):
            dump.put(keys[start : start + AT_ONCE], locations[start : start + AT_ONCE])
            yield
        for start in range(0, len(had_keys), AT_ONCE):
            had, at = had_keys[start : start + AT_ONCE], had_locations[start : start + AT_ONCE]
            found, there = dump.find(had)
            gone = ~there | (found != at)
            self.reclaim.dropped(had[gone], at[gone])
            yield
        for start in range(0, len(keys), AT_ONCE):
            some, of, at = (array[start : start + AT_ONCE] for array in (keys, parents, locations))
            found, there = self.reclaim.find(some)
            new = ~there | (found != at)
            self.stored(writer, some[new], of[new], at[new], now_s)
            yield

    def dropped(self, keys: Keys, locations: Values) -> None:
        """A writer has freed these."""
        self.reclaim.dropped(keys, locations)

    def forget(self, slab: int) -> None:
        """A slab is gone, with all that was in it."""
        self.reclaim.dropped(*self.reclaim.inside([slab]))

    def make_room(self, writer: str, num_slots: int) -> None:
        """Drop the least recently used blocks until so many slots of a writer are free, within reason (EXTRA)."""
        num_left, num_ours = EXTRA * num_slots, 0
        while num_left > 0 and num_ours < num_slots:
            keys, locations = self.reclaim.victims(min(num_left, num_slots - num_ours))
            if not len(keys):
                break
            num_left -= len(keys)
            num_ours += int(self._drop(keys, locations).get(writer, 0))
            self.num_reclaimed += len(keys)

    def _owner(self, word: int) -> str | None:
        return self._writers.owner(location.Location.unpack(word).slab)

    def _drop(self, keys: Keys, locations: Values) -> dict[str, int]:
        """Have their writers free these; how many each has. There is nobody to tell of those nobody is known to own."""
        owners = [self._owner(word) for word in locations.tolist()]
        counts: dict[str, int] = {}
        for writer in {owner: None for owner in owners if owner is not None}:
            theirs: Flags = np.array([owner == writer for owner in owners], dtype=np.bool_)
            self.drops.setdefault(writer, []).append((keys[theirs], locations[theirs]))
            counts[writer] = int(theirs.sum())
        return counts
