"""Which blocks go first: the least recently used, and never one before those that build on it.

A block without its ancestors is never hit, as a hit ends at the first block that is missing. So the use of a block is
one of all its ancestors (spec serving.md §3, K3): none is ever older than its descendants, and only leaves go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

_SMALL = 64
"""So many entries of the heap are not worth a look for useless ones."""


class Reclaim:
    """Blocks by the time of their last use. Time does not run backwards: an earlier `now` counts as the latest one.

    `stored` and `touched` cost a step for each ancestor that was not used at the same `now`; so blocks of one chain are
    best told with one time. All else costs a few steps for each block.
    """

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}
        self._times: dict[bytes, float] = {}
        self._num_children: dict[bytes, int] = {}  # of every parent of a block, whether it is here or not
        # Leaves are either in order of time, or, those that were parents before, in a heap: their time is an old one.
        self._leaves: OrderedDict[bytes, None] = OrderedDict()
        self._bared: list[tuple[float, bytes]] = []
        self._now = float("-inf")

    @property
    def num_blocks(self) -> int:
        """How many blocks are here."""
        return len(self._times)

    def stored(self, key: bytes, parent: bytes, now: float) -> None:
        """A block is here, and used. Its parent may be unknown, and come later or never."""
        self._now = max(now, self._now)
        if key not in self._times:
            self._parents[key] = parent
            self._times[key] = float("-inf")
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
            self._leaves.pop(parent, None)
        self._touch(key)

    def touched(self, keys: Iterable[bytes], now: float) -> None:
        """Blocks, and so their ancestors, were used. Unknown ones are passed over."""
        self._now = max(now, self._now)
        for key in keys:
            self._touch(key)

    def dropped(self, key: bytes) -> None:
        """A block is gone, if it was here. Blocks that build on it stay, until they go as the least recently used."""
        if self._times.pop(key, None) is None:
            return
        self._leaves.pop(key, None)
        parent = self._parents.pop(key)
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return
        del self._num_children[parent]
        if parent in self._times:
            heappush(self._bared, (self._times[parent], parent))
            if len(self._bared) > _SMALL + 2 * len(self._times):
                self._bared = [entry for entry in set(self._bared) if self._is_bared(entry)]
                heapify(self._bared)

    def victims(self, num: int) -> list[bytes]:
        """The next blocks to go, `num` if there are as many: from now on they are not here.

        The least recently used leaf first, then the same of what is left: so each comes before its parent.
        """
        keys: list[bytes] = []
        while len(keys) < num and self._times:
            while self._bared and not self._is_bared(self._bared[0]):
                heappop(self._bared)
            first = next(iter(self._leaves), None)
            if self._bared and (first is None or self._bared[0][0] <= self._times[first]):
                first = heappop(self._bared)[1]
            if first is None:
                break  # blocks that are their own ancestors, which no digest is, and no leaf
            self.dropped(first)
            keys.append(first)
        return keys

    def _touch(self, key: bytes) -> None:
        times, now = self._times, self._now
        if key in times and times[key] != now and key not in self._num_children:
            self._leaves[key] = None
            self._leaves.move_to_end(key)
        # None is older than its descendants: where the time is now's, it is so all the way up.
        while times.get(key, now) != now:
            times[key] = now
            key = self._parents[key]

    def _is_bared(self, entry: tuple[float, bytes]) -> bool:
        time, key = entry
        return self._times.get(key) == time and key not in self._num_children
