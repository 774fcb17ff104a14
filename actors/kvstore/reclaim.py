"""Which blocks go first: the least recently used, and never one before those that build on it.

A block without its ancestors is never hit, as a hit ends at the first block that is missing. So the use of a block is
one of all its ancestors (spec serving.md §3, K3): none is ever older than its descendants, and only leaves go.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.rules import location
from actors.rules.blocks import BlockTable, Flags, Keys, Values
from actors.rules.keys import last_of_equal

Ids = npt.NDArray[np.int64]

_NEVER = float("-inf")
_POOL = 1 << 16
"""So many of the oldest leaves are looked for at a time."""
_SMALLEST = 1024
_ARRAYS = ("_keys", "_locations", "_parents", "_times", "_num_children", "_is_here", "_free")


class Reclaim:
    """Blocks, where each is, and when it was last used. Time does not run backwards: an earlier `now` is the latest.

    Each has a number, by which all is kept in flat arrays: some hundred bytes a block. Parents that are not here have
    one too, until nothing builds on them. Whole chains at a time are a few numpy calls.
    """

    def __init__(self) -> None:
        self._table = BlockTable()  # key to number
        self._keys: Keys = np.zeros((_SMALLEST, 2), dtype=np.uint64)
        self._locations: Values = np.zeros(_SMALLEST, dtype=np.uint64)
        self._parents = np.zeros(_SMALLEST, dtype=np.int32)
        self._times = np.zeros(_SMALLEST, dtype=np.float64)
        self._num_children = np.zeros(_SMALLEST, dtype=np.int32)
        self._is_here = np.zeros(_SMALLEST, dtype=np.bool_)
        self._free = np.arange(_SMALLEST, dtype=np.int32)[::-1].copy()  # used as a stack
        self._num_free = _SMALLEST
        self._now = _NEVER
        self.num_blocks = 0
        # Of the leaves, all that are older than `_pool_until`, and maybe some that are no leaves, or used again since.
        self._pool: list[tuple[float, int]] = []
        self._pool_until = _NEVER

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, free room included."""
        arrays: list[npt.NDArray[Any]] = [getattr(self, name) for name in _ARRAYS]
        return self._table.size_bytes + sum(array.nbytes for array in arrays)

    def find(self, keys: Keys) -> tuple[Values, Flags]:
        """Where blocks are, and which of them are here."""
        ids, there = self._look_up(keys)
        return self._locations[ids], there

    def inside(self, slabs: Sequence[int]) -> tuple[Keys, Values]:
        """All blocks in these slabs, and where."""
        ids = np.flatnonzero(self._is_here)
        ids = ids[np.isin(location.slabs(self._locations[ids]), np.array(slabs, dtype=np.uint64))]
        return self._keys[ids], self._locations[ids]

    def stored(self, keys: Keys, parents: Keys, locations: Values, now: float) -> None:
        """Blocks are here, and used; or at another place. Parents may be unknown, and come later or never."""
        self._now = max(now, self._now)
        ids, of = np.split(self._number(np.concatenate((keys, parents))), 2)
        self._locations[ids] = locations
        new, first = np.unique(ids, return_index=True)
        new, first = new[~self._is_here[new]], first[~self._is_here[new]]
        self._parents[new] = of[first]
        self._times[new] = _NEVER
        self._is_here[new] = True
        self.num_blocks += len(new)
        np.add.at(self._num_children, of[first], 1)
        self._touch(ids)
        self._let_go(of)  # such that were named only by blocks that were here already

    def touched(self, keys: Keys, now: float) -> None:
        """Blocks, and so their ancestors, were used. Unknown ones are passed over."""
        self._now = max(now, self._now)
        ids, there = self._look_up(keys)
        self._touch(ids[there])

    def dropped(self, keys: Keys, locations: Values) -> int:
        """Blocks are gone, where they were at these locations; how many. Those that build on them stay, until they go
        as the least recently used."""
        ids, there = self._look_up(keys)
        ids = np.unique(ids[there & (self._locations[ids] == locations)])
        self._is_here[ids] = False
        self.num_blocks -= len(ids)
        of = self._parents[ids]
        np.subtract.at(self._num_children, of, 1)
        for id in np.unique(of[self._is_here[of] & (self._num_children[of] == 0)]).tolist():
            self._bared(id)
        self._let_go(np.concatenate((ids, of)))
        return len(ids)

    def victims(self, num: int) -> tuple[Keys, Values]:
        """The next blocks to go, `num` if there are as many, and where they are: from now on they are not here.

        The least recently used leaf first, then the same of what is left: so each comes before its parent.
        """
        gone: list[int] = []
        is_here, times, num_children, parents = self._is_here, self._times, self._num_children, self._parents
        while len(gone) < num:
            if not self._pool and not self._refill():
                break  # none is here, or they are their own ancestors, which no digest is
            time, id = heappop(self._pool)
            if not is_here[id] or num_children[id] or times[id] != time:
                continue
            gone.append(id)
            is_here[id] = False
            parent = int(parents[id])
            num_children[parent] -= 1
            if not num_children[parent] and is_here[parent]:
                self._bared(parent)
        self.num_blocks -= len(gone)
        ids = np.array(gone, dtype=np.int64)
        found = self._keys[ids], self._locations[ids]
        self._let_go(np.concatenate((ids, parents[ids])))
        return found

    # Use

    def _touch(self, ids: Ids) -> None:
        now = self._now
        ids = ids[self._is_here[ids] & (self._times[ids] != now)]
        self._times[ids] = now
        # None is older than its descendants: where the time is now's, it is so all the way up. Ancestors are a chain,
        # which has to be gone up one by one: with a call of numpy for each, a long one would take a tenth of a second.
        times: Any = self._times.data
        is_here, parents = self._is_here.data, self._parents.data
        for id in self._parents[ids].tolist():
            while is_here[id] and times[id] != now:
                times[id] = now
                id = parents[id]

    def _bared(self, id: int) -> None:
        """It is a leaf, and was none."""
        time = float(self._times[id])
        if time > self._pool_until:
            return
        heappush(self._pool, (time, id))
        if len(self._pool) > 4 * _POOL:
            self._pool, self._pool_until = [], _NEVER

    def _refill(self) -> bool:
        ids = np.flatnonzero(self._is_here & (self._num_children == 0))
        if len(ids) > _POOL:
            ids = ids[np.argpartition(self._times[ids], _POOL)[:_POOL]]
        self._pool = list(zip(self._times[ids].tolist(), ids.tolist(), strict=True))
        heapify(self._pool)
        self._pool_until = float(self._times[ids].max(initial=_NEVER))
        return bool(self._pool)

    # Numbers

    def _look_up(self, keys: Keys) -> tuple[Ids, Flags]:
        """The numbers of blocks, and which are here; 0 for those without one."""
        values, there = self._table.find(keys)
        ids = values.astype(np.int64)
        return ids, there & self._is_here[ids]

    def _number(self, keys: Keys) -> Ids:
        """The number of each key, new ones where there were none."""
        numbers, there = self._table.find(keys)
        if not there.all():
            new = keys[~there]
            last, group = last_of_equal(new)
            self._reserve(len(last))
            self._num_free -= len(last)
            ids = self._free[self._num_free : self._num_free + len(last)].astype(np.uint64)
            self._keys[ids] = new[last]
            self._table.add(new[last], ids)
            numbers[~there] = ids[group]
        return numbers.astype(np.int64)

    def _let_go(self, ids: Ids) -> None:
        """Of numbers in use: those of blocks that are not here, and that nothing builds on."""
        ids = np.unique(ids[~self._is_here[ids] & (self._num_children[ids] == 0)])
        self._table.remove(self._keys[ids], ids.astype(np.uint64))
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def _reserve(self, num: int) -> None:
        if num <= self._num_free:
            return
        before = len(self._keys)
        after = max(before + num, before + before // 4)
        for name in _ARRAYS:  # one at a time: the memory of one of them twice, not of all
            array: npt.NDArray[Any] = getattr(self, name)
            grown = np.zeros((after, *array.shape[1:]), dtype=array.dtype)
            grown[:before] = array
            setattr(self, name, grown)
        self._free[self._num_free : self._num_free + after - before] = np.arange(before, after)[::-1]
        self._num_free += after - before
