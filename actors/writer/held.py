"""One slab of a writer: what each of its slots is for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from actors.rules.location import SLOT_BITS, file_name
from actors.rules.slab import HEADER_BYTES, Slab
from actors.writer.blocks import Blocks

FREE, BUSY, EXACT, APPROXIMATE = range(4)
"""What a slot is: to be had; being written or freed, and seen by nobody; or a block's."""

Layout = tuple[int, bytes]
"""Payload bytes and digest: blocks of one layout share slabs."""


def new_slab(layout: Layout, file_bytes: int) -> Slab:
    """What a new file is like: of so many bytes at most, but of one slot at least."""
    num_slots = (file_bytes - HEADER_BYTES) // (HEADER_BYTES + layout[0])
    return Slab(layout[0], min(max(num_slots, 1), 1 << SLOT_BITS), layout[1], epoch=1)


class HeldSlab:
    """The file `number` of the writer `writer`, all of its slots free. 33 bytes a slot."""

    def __init__(self, number: int, writer: str, slab: Slab) -> None:
        self.number = number
        self.name = file_name(number, writer)
        self.slab = slab
        self.keys = np.zeros((slab.num_slots, 2), np.uint64)
        self.parents = np.zeros((slab.num_slots, 2), np.uint64)
        self.states = np.zeros(slab.num_slots, np.uint8)
        self.free = list(range(slab.num_slots - 1, -1, -1))  # taken from the end: neighbours are written together

    @property
    def layout(self) -> Layout:
        """Of its payloads."""
        return self.slab.payload_bytes, self.slab.layout

    def location(self, slot: int) -> int:
        """The word that leads to a slot with a block in it."""
        return self.number << (SLOT_BITS + 1) | slot << 1 | (int(self.states[slot]) == APPROXIMATE)

    def blocks(self) -> Blocks:
        """All that are here; copies."""
        slots = np.flatnonzero(self.states >= EXACT)
        base = np.uint64(self.number << (SLOT_BITS + 1))
        flags = (self.states[slots] == APPROXIMATE).astype(np.uint64)
        return Blocks(self.keys[slots], self.parents[slots], base | slots.astype(np.uint64) << np.uint64(1) | flags)


class Place(NamedTuple):
    """One slot."""

    held: HeldSlab
    slot: int
