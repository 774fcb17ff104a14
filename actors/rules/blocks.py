"""Where blocks are: a hash table of 128-bit keys in a few flat arrays, some fifty bytes an entry with its free room.

Open addressing, linear probing; whole arrays of keys at a time, so that a chain of 8,192 blocks is a few numpy calls.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]  # [n, 2]
Values = npt.NDArray[np.uint64]  # [n]
Flags = npt.NDArray[np.bool_]  # [n]

_MOST_FULL = 0.6
_SMALLEST = 1024
_AT_ONCE = 1 << 18  # entries: what is copied of them at a time is a few megabytes
_EMPTY, _LIVE, _GONE = np.uint8(0), np.uint8(1), np.uint8(2)


class BlockTable:
    """128-bit keys to 64-bit values. Keys are digests: their bits are as good as any hash of them."""

    def __init__(self) -> None:
        self._allocate(_SMALLEST)

    def __len__(self) -> int:
        return self._num_live

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, free room included."""
        return self._keys.nbytes + self._values.nbytes + self._states.nbytes

    def find(self, keys: Keys) -> tuple[Values, npt.NDArray[np.bool_]]:
        """The values of `keys` [n, 2], and which of them are here."""
        at = self._places(keys)
        there = at >= 0
        values = np.zeros(len(keys), dtype=np.uint64)
        values[there] = self._values[at[there]]
        return values, there

    def put(self, keys: Keys, values: Values) -> None:
        """Set the values of `keys`; of equal keys the last one counts."""
        if not len(keys):
            return
        self._reserve(len(keys))
        at = self._places(keys)
        known = at >= 0
        self._values[at[known]] = values[known]
        if known.all():
            return
        fresh = np.flatnonzero(~known)[::-1]
        # Of equal new keys only the last goes in: the first one from behind.
        _, first = np.unique(keys[fresh], axis=0, return_index=True)
        self._insert(keys[fresh[first]], values[fresh[first]])

    def remove(self, keys: Keys, values: Values) -> Flags:
        """Forget `keys`, where they are here with these values: for each whether it was."""
        at = self._places(keys)
        there = at >= 0
        there[there] = self._values[at[there]] == values[there]
        gone = np.unique(at[there])
        self._states[gone] = _GONE
        self._num_live -= len(gone)
        return there

    def remove_where(self, is_gone: Callable[[Keys, Values], Flags]) -> int:
        """Forget all that `is_gone` says, which is asked of so many at a time; how many those were."""
        before = self._num_live
        for start in range(0, len(self._states), _AT_ONCE):
            live = start + np.flatnonzero(self._states[start : start + _AT_ONCE] == _LIVE)
            gone = live[is_gone(self._keys[live], self._values[live])]
            self._states[gone] = _GONE
            self._num_live -= len(gone)
        return before - self._num_live

    def items(self) -> tuple[Keys, Values]:
        """All keys and values, in no order."""
        live = self._states == _LIVE
        return self._keys[live], self._values[live]

    def _allocate(self, capacity: int) -> None:
        self._keys = np.zeros((capacity, 2), dtype=np.uint64)
        self._values = np.zeros(capacity, dtype=np.uint64)
        self._states = np.zeros(capacity, dtype=np.uint8)
        self._mask = np.uint64(capacity - 1)
        self._num_live = self._num_used = 0  # used: live, or gone and in somebody's way

    def _reserve(self, num_new: int) -> None:
        capacity = len(self._states)
        if self._num_used + num_new <= capacity * _MOST_FULL:
            return
        keys, values = self.items()
        while len(keys) + num_new > capacity * _MOST_FULL / 1.5:
            capacity *= 2
        self._allocate(capacity)
        self._insert(keys, values)

    def _places(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The place of each key, -1 for those that are not here."""
        found = np.full(len(keys), -1, dtype=np.int64)
        left = np.arange(len(keys))
        at = keys[:, 0] & self._mask
        while len(left):
            states = self._states[at]
            same = (states == _LIVE) & (self._keys[at] == keys[left]).all(1)
            found[left[same]] = at[same]
            going = ~same & (states != _EMPTY)
            left, at = left[going], (at[going] + np.uint64(1)) & self._mask
        return found

    def _insert(self, keys: Keys, values: Values) -> None:
        """Keys that are not here, each once, with room for all."""
        left = np.arange(len(keys))
        at = keys[:, 0] & self._mask
        while len(left):
            free = np.flatnonzero(self._states[at] == _EMPTY)
            _, first = np.unique(at[free], return_index=True)  # of those that want one place, one gets it
            taken = free[first]
            place = at[taken]
            self._keys[place], self._values[place] = keys[left[taken]], values[left[taken]]
            self._states[place] = _LIVE
            going = np.ones(len(left), dtype=bool)
            going[taken] = False
            left, at = left[going], (at[going] + np.uint64(1)) & self._mask
        self._num_live += len(keys)
        self._num_used += len(keys)
