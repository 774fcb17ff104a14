"""Where blocks are: a hash table of 128-bit keys in a few flat arrays, some fifty bytes an entry with its free room.

Open addressing, linear probing; whole arrays of keys at a time, so that a chain of 8,192 blocks is a few numpy calls.
It grows a little with each call rather than all at once, so none of them takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from actors.rules.keys import last_of_equal

Keys = npt.NDArray[np.uint64]  # [n, 2]
Values = npt.NDArray[np.uint64]  # [n]
Flags = npt.NDArray[np.bool_]  # [n]
Places = npt.NDArray[np.int64]  # [n]

_MOST_FULL = 0.7
_GROWTH = 1.4
_SMALLEST = 1024
_AT_ONCE = 1 << 14
"""Places looked through, or moved from, at a time: a few milliseconds."""
_FEW = 32
"""So many keys are sooner looked for one by one than all at once, a place further each time."""
_EMPTY, _LIVE, _GONE = 0, 1, 2


class BlockTable:
    """128-bit keys to 64-bit values. Keys are digests: their bits are as good as any hash of them."""

    def __init__(self) -> None:
        # The last one is filled; those before it are being moved there.
        self._arrays = [_Array(_SMALLEST)]
        self._next = 0  # place of the first array to be moved next

    def __len__(self) -> int:
        return sum(array.num_live for array in self._arrays)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, free room included."""
        return sum(array.size_bytes for array in self._arrays)

    def find(self, keys: Keys) -> tuple[Values, Flags]:
        """The values of `keys` [n, 2], and which of them are here."""
        values = np.zeros(len(keys), dtype=np.uint64)
        there = np.zeros(len(keys), dtype=np.bool_)
        for array, numbers, at in self._places(keys):
            values[numbers] = array.values[at]
            there[numbers] = True
        return values, there

    def put(self, keys: Keys, values: Values) -> None:
        """Set the values of `keys`; of equal keys the last one counts."""
        last, _ = last_of_equal(keys)
        keys, values = keys[last], values[last]
        is_new = np.ones(len(keys), dtype=np.bool_)
        for array, numbers, at in self._places(keys):
            array.values[at] = values[numbers]
            is_new[numbers] = False
        self.add(keys[is_new], values[is_new])

    def add(self, keys: Keys, values: Values) -> None:
        """As `put`, for keys that are not here, each once."""
        self._reserve(len(keys))
        self._arrays[-1].insert(keys, values)

    def remove(self, keys: Keys, values: Values) -> Flags:
        """Forget `keys`, where they are here with these values: for each whether it was."""
        gone = np.zeros(len(keys), dtype=np.bool_)
        for array, numbers, at in self._places(keys):
            same = array.values[at] == values[numbers]
            gone[numbers[same]] = True
            array.remove(np.unique(at[same]))
        return gone

    def sweep(self, is_gone: Callable[[Keys, Values], Flags]) -> Iterator[None]:
        """Forget all that `is_gone` says, which is asked of some at a time. Between steps the table may be used."""
        swept: list[_Array] = []
        # Entries move from earlier arrays to later ones, so none gets past.
        while left := [array for array in self._arrays if array not in swept]:
            for start in range(0, left[0].capacity, _AT_ONCE):
                at = left[0].live(start)
                left[0].remove(at[is_gone(left[0].keys[at], left[0].values[at])])
                yield
            swept.append(left[0])

    def _places(self, keys: Keys) -> Iterator[tuple[_Array, Places, Places]]:
        """Of each array, the numbers of the keys that are there, and their places."""
        left = np.arange(len(keys))
        for array in reversed(self._arrays):
            if not len(left):
                return
            at = array.places(keys[left])
            there = at >= 0
            yield array, left[there], at[there]
            left = left[~there]

    def _reserve(self, num_new: int) -> None:
        """Have room for so many, and move on with what is to be moved."""
        num_places = max(_AT_ONCE, 4 * num_new)  # more than it takes to be done before there is no room again
        if len(self._arrays) > 1:
            self._move(num_places)
        if self._arrays[-1].has_room(num_new + sum(array.num_live for array in self._arrays[:-1])):
            return
        if len(self._arrays) > 1:
            self._move(self._arrays[0].capacity)
        self._arrays.append(_Array(max(_SMALLEST, int((len(self) + num_new) * _GROWTH / _MOST_FULL))))
        self._move(num_places)

    def _move(self, num_places: int) -> None:
        source, target = self._arrays[0], self._arrays[-1]
        end = min(self._next + num_places, source.capacity)
        for start in range(self._next, end, _AT_ONCE):
            at = source.live(start)
            target.insert(source.keys[at], source.values[at])
            source.remove(at)
        self._next = end
        if not source.num_live:
            del self._arrays[0]
            self._next = 0


class _Array:
    """A table that does not grow. The place of a removed entry may be in the way of others until it is used again."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Keys = np.zeros((capacity, 2), dtype=np.uint64)
        self.values: Values = np.zeros(capacity, dtype=np.uint64)
        self._states = np.zeros(capacity, dtype=np.uint8)
        self.num_live = 0
        self._num_used = 0  # live, or gone and in somebody's way

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self._states.nbytes

    def has_room(self, num_new: int) -> bool:
        return self._num_used + num_new <= self.capacity * _MOST_FULL

    def live(self, start: int) -> Places:
        """The next `_AT_ONCE` places, as far as there is something."""
        return start + np.flatnonzero(self._states[start : start + _AT_ONCE] == _LIVE)

    def places(self, keys: Keys) -> Places:
        """The place of each key, -1 for those that are not here."""
        found = np.full(len(keys), -1, dtype=np.int64)
        left, at = np.arange(len(keys)), self._first(keys)
        while len(left) > _FEW:
            states, here, wanted = self._states[at], self.keys[at], keys[left]
            same = (states == _LIVE) & (here[:, 0] == wanted[:, 0]) & (here[:, 1] == wanted[:, 1])
            found[left[same]] = at[same]
            going = np.flatnonzero(~same & (states != _EMPTY))
            left, at = left[going], (at[going] + 1) % self.capacity
        all_states, all_keys, last = self._states.data, self.keys.data, self.capacity - 1
        for number, place, (low, high) in zip(left.tolist(), at.tolist(), keys[left].tolist(), strict=True):
            while (state := all_states[place]) != _EMPTY:
                if state == _LIVE and all_keys[place, 0] == low and all_keys[place, 1] == high:
                    found[number] = place
                    break
                place = place + 1 if place < last else 0
        return found

    def insert(self, keys: Keys, values: Values) -> None:
        """Keys that are not here, each once, with room for all."""
        left, at = np.arange(len(keys)), self._first(keys)
        while len(left) > _FEW:
            numbers = left.astype(np.uint64)
            states = self._states[at]
            free = states != _LIVE
            # Each says that a free place is its own. Of those that want one place, the last to say so gets it.
            self.values[at[free]] = numbers[free]
            won = free & (self.values[at] == numbers)
            place, winners = at[won], left[won]
            self.keys[place], self.values[place] = keys[winners], values[winners]
            self._num_used += int((states[won] == _EMPTY).sum())
            self._states[place] = _LIVE
            left, at = left[~won], (at[~won] + 1) % self.capacity
        all_states, last = self._states.data, self.capacity - 1
        places = at.tolist()
        for number, place in enumerate(places):
            while all_states[place] == _LIVE:
                place = place + 1 if place < last else 0
            self._num_used += all_states[place] == _EMPTY
            self._states[place] = _LIVE
            places[number] = place
        self.keys[places], self.values[places] = keys[left], values[left]
        self.num_live += len(keys)

    def remove(self, at: Places) -> None:
        """Forget what is at these places, each named once."""
        self.num_live -= len(at)
        self._states[at] = _GONE
        # What has nothing behind it is in nobody's way.
        while len(at := at[(self._states[at] == _GONE) & (self._states[(at + 1) % self.capacity] == _EMPTY)]):
            self._states[at] = _EMPTY
            self._num_used -= len(at)
            at = (at - 1) % self.capacity

    def _first(self, keys: Keys) -> Places:
        """Where to begin to look: by the key's highest bits."""
        return ((keys[:, 0] >> np.uint64(32)) * np.uint64(self.capacity) >> np.uint64(32)).astype(np.int64)
