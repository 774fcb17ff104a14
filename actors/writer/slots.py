"""All slots of one writer: which are free, which block is in which, and what the world was told of it.

A slot has one of four states (held.py) and leaves each by one way:

    free ── take ──> busy ── commit ──> a block's ── drop, or a better copy ──> busy ── release ──> free

What is busy is neither found nor given away. Whoever was handed a busy place brings it back: by `commit` when its slot
is whole on the disk, by `release` when it is written free, by `fail` when neither could be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from actors.rules.blocks import BlockTable
from actors.rules.keys import Keys
from actors.rules.location import Location, slabs
from actors.rules.location import approximate as is_approximate
from actors.rules.slab import Slab, SlotHeader
from actors.writer.blocks import Blocks
from actors.writer.held import APPROXIMATE, BUSY, EXACT, FREE, HeldSlab, Layout, Place
from schemas.cache import BlocksDropped, BlocksStored

Words = npt.NDArray[np.uint64]


class Slots:
    """The index of one incarnation of a writer. Every change of what can be found puts events into `outbox`, in order;
    `seq` is the last one's.
    """

    def __init__(self, writer: str, incarnation: str) -> None:
        self.writer = writer
        self.seq = 0
        self.outbox: list[BlocksStored | BlocksDropped] = []
        self.num_slots = 0
        self._incarnation = incarnation
        self._slabs: dict[int, HeldSlab] = {}
        self._table = BlockTable()
        self._stuck: list[Place] = []

    @property
    def num_blocks(self) -> int:
        """How many can be found."""
        return len(self._table)

    @property
    def slabs(self) -> Sequence[HeldSlab]:
        """All that are held."""
        return list(self._slabs.values())

    def num_free(self, layout: Layout | None = None) -> int:
        """Slots that can be taken, for blocks of this layout, or of any."""
        return sum(len(held.free) for held in self._slabs.values() if layout in (None, held.layout))

    def at(self, keys: Keys, locations: Words) -> Sequence[Place]:
        """The places of those blocks that are where they are said to be, each once."""
        known, is_here = self._table.find(keys)
        there = np.unique(locations[is_here & (known == locations)])
        return [self._place(word) for word in there.tolist()]

    def _place(self, word: int) -> Place:
        number, slot, _ = Location.unpack(word)
        return Place(self._slabs[number], slot)

    # Slabs

    def add(self, number: int, slab: Slab, used: Sequence[int] = ()) -> HeldSlab:
        """A file is ours. The slots `used` are busy until it is said what is in them, see `fill`.

        Raises ValueError if it is ours already.
        """
        if number in self._slabs:
            raise ValueError(f"slab {number:010x} is here")
        held = self._slabs[number] = HeldSlab(number, self.writer, slab)
        self.num_slots += slab.num_slots
        held.states[np.array(used, np.int64)] = BUSY
        held.free = [slot for slot in held.free if held.states[slot] == FREE]
        return held

    def fill(self, held: HeldSlab, headers: Sequence[tuple[int, SlotHeader]]) -> Sequence[Place]:
        """What is in some of the used slots. Returns busy places to be freed: blocks that are there twice."""
        keys = np.frombuffer(b"".join(header.key for _, header in headers), "<u8").reshape(-1, 2)
        parents = np.frombuffer(b"".join(header.parent for _, header in headers), "<u8").reshape(-1, 2)
        flags = np.array([header.approximate for _, header in headers])
        _, surplus = self.commit([Place(held, slot) for slot, _ in headers], keys, parents, flags)
        return surplus

    def forget(self, held: HeldSlab) -> None:
        """A file is gone, and with it all its blocks. What is busy there needs not come back."""
        if not self.holds(held):
            return
        del self._slabs[held.number]
        self.num_slots -= held.slab.num_slots
        self._stuck = [place for place in self._stuck if place.held is not held]
        blocks = held.blocks()
        self._table.remove(blocks.keys, blocks.locations)
        self._tell_dropped(blocks)

    def holds(self, held: HeldSlab) -> bool:
        """Whether this file is still ours."""
        return self._slabs.get(held.number) is held

    def empty(self, layout: Layout) -> Sequence[HeldSlab]:
        """Slabs with nothing in them, of no use for blocks of this layout."""
        return [h for h in self._slabs.values() if h.layout != layout and len(h.free) == h.slab.num_slots]

    # Slots

    def wanted(self, keys: Keys, *, approximate: bool) -> npt.NDArray[np.bool_]:
        """Which of these are worth a write: not here, or only as an approximation of what is offered; each once."""
        locations, is_here = self._table.find(keys)
        chosen = ~is_here | (is_approximate(locations) & (not approximate))
        first: dict[bytes, int] = {}
        for number, key in enumerate(_names(keys)):
            first.setdefault(key, number)
        is_first = np.zeros(len(keys), bool)
        is_first[list(first.values())] = True
        return np.asarray(chosen & is_first)

    def take(self, layout: Layout, num: int) -> Sequence[Place] | None:
        """So many free places, now busy; None, and none taken, if there are not enough."""
        if self.num_free(layout) < num:
            return None
        places: list[Place] = []
        for held in self._slabs.values():
            while held.layout == layout and held.free and len(places) < num:
                places.append(Place(held, held.free.pop()))
                held.states[places[-1].slot] = BUSY
        return places

    def commit(
        self, places: Sequence[Place], keys: Keys, parents: Keys, approximate: npt.NDArray[np.bool_]
    ) -> tuple[int, Sequence[Place]]:
        """The slots of these busy places are whole. How many blocks can be found anew or as a better copy, and busy
        places to be freed: of the worse copies, here or there. Of two alike the one that was here first stays.
        """
        locations, is_here = self._table.find(keys)
        best = {
            key: int(location) & 1
            for key, location, here in zip(_names(keys), locations, is_here, strict=True)
            if here
        }
        stored: dict[bytes, int] = {}
        surplus: list[Place] = []
        for number, (place, key) in enumerate(zip(places, _names(keys), strict=True)):
            if not self.holds(place.held):
                continue
            flag = int(approximate[number])
            if best.get(key, 2) <= flag:
                surplus.append(place)
                continue
            if key in stored:
                surplus.append(places[stored[key]])
            elif key in best:
                surplus.append(self._place(int(locations[number])))
            best[key] = flag
            stored[key] = number
        for old in surplus:
            old.held.states[old.slot] = BUSY
        for number in stored.values():
            held, slot = places[number]
            held.keys[slot], held.parents[slot] = keys[number], parents[number]
            held.states[slot] = APPROXIMATE if approximate[number] else EXACT
        chosen = np.array(list(stored.values()), np.int64)
        words = np.array([places[number].held.location(places[number].slot) for number in chosen], np.uint64)
        self._table.put(keys[chosen], words)
        self._tell_stored(Blocks(keys[chosen], parents[chosen], words))
        return len(stored), surplus

    def drop(self, keys: Keys, locations: Words) -> Sequence[Place]:
        """Find these blocks no longer, where they are still in these places: busy now, to be freed."""
        places = self.at(keys, locations)
        if places:
            dropped = _blocks(places)
            for held, slot in places:
                held.states[slot] = BUSY
            self._table.remove(dropped.keys, dropped.locations)
            self._tell_dropped(dropped)
        return places

    def release(self, places: Sequence[Place]) -> None:
        """These busy places are written free."""
        for held, slot in places:
            if self.holds(held):
                assert held.states[slot] == BUSY
                held.states[slot] = FREE
                held.free.append(slot)

    def fail(self, places: Sequence[Place]) -> None:
        """These busy places could not be written: they stay busy until another try, see `stuck`."""
        self._stuck += [place for place in places if self.holds(place.held)]

    def stuck(self) -> Sequence[Place]:
        """What `fail` kept, to be freed now."""
        places, self._stuck = self._stuck, []
        return places

    # Telling

    def dump(self) -> Blocks:
        """All that can be found, as told by the events up to `seq`."""
        return Blocks.join([held.blocks() for held in self._slabs.values()])

    def repeat(self, keys: Keys) -> None:
        """Tell once more of those that can be found: somebody has not heard of them."""
        locations, is_here = self._table.find(keys)
        places = self.at(keys, locations) if is_here.any() else ()
        if places:
            self._tell_stored(_blocks(places))

    def deny(self, keys: Keys, locations: Words) -> None:
        """Tell of those that are said to be in our slabs, and are not, that they are not."""
        known, is_here = self._table.find(keys)
        is_ours = np.isin(slabs(locations), np.array(list(self._slabs), np.uint64))
        wrong = is_ours & ~(is_here & (known == locations))
        self._tell_dropped(Blocks(keys[wrong], keys[wrong], locations[wrong]))

    def _tell_stored(self, blocks: Blocks) -> None:
        self._tell(list(blocks.stored(self.writer, self._incarnation, self.seq + 1)))

    def _tell_dropped(self, blocks: Blocks) -> None:
        self._tell(list(blocks.dropped(self.writer, self._incarnation, self.seq + 1)))

    def _tell(self, events: Sequence[BlocksStored | BlocksDropped]) -> None:
        self.outbox += events
        self.seq += len(events)


def _blocks(places: Sequence[Place]) -> Blocks:
    """What is in these places, of which there are some."""
    return Blocks(
        np.stack([held.keys[slot] for held, slot in places]),
        np.stack([held.parents[slot] for held, slot in places]),
        np.array([held.location(slot) for held, slot in places], np.uint64),
    )


def _names(keys: Keys) -> Iterator[bytes]:
    """Each key as bytes."""
    data = keys.tobytes()
    return (data[at : at + 16] for at in range(0, len(data), 16))
