"""Where a stored block is: one 64-bit word, and the name of the file that it leads to.

A word is slab number (39 bits), slot (24 bits), and whether the block is approximate (1 bit). Slab numbers are drawn by
chance by whoever makes the file; its name has the number and the one writer that owns it. Two slabs of one number,
however unlikely, cost a miss: whoever reads checks the key.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.rules.chain import KEY_BYTES
from actors.rules.keys import keys as as_keys

SLAB_BITS = 39
SLOT_BITS = 24
LOCATION_BYTES = 8

_NAME = re.compile(r"([0-9a-f]{10})\.([A-Za-z0-9_-]+)\.slab")


class Location(NamedTuple):
    """`slot` of the slab with the number `slab`."""

    slab: int
    slot: int
    approximate: bool = False

    def pack(self) -> int:
        """As one word. Raises ValueError for numbers that do not fit."""
        if not (0 <= self.slab < 1 << SLAB_BITS and 0 <= self.slot < 1 << SLOT_BITS):
            raise ValueError(f"{self} is no location")
        return self.slab << (SLOT_BITS + 1) | self.slot << 1 | self.approximate

    @classmethod
    def unpack(cls, word: int) -> Location:
        """The location that `pack` made `word` of."""
        return cls(word >> (SLOT_BITS + 1), word >> 1 & (1 << SLOT_BITS) - 1, bool(word & 1))


def words(data: bytes) -> npt.NDArray[np.uint64]:
    """Packed locations as they travel, u64 little-endian [num]. Raises ValueError for a part of one."""
    return np.frombuffer(data, dtype="<u8")


def slabs(packed: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The slab number of each."""
    return packed >> np.uint64(SLOT_BITS + 1)


def approximate(packed: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which of them say that their block is approximate."""
    return (packed & np.uint64(1)).astype(np.bool_)


def blocks(keys: bytes, locations: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None:
    """Keys [num, 2] and as many locations [num], as they travel together; None if they do not belong together."""
    if len(keys) * LOCATION_BYTES != len(locations) * KEY_BYTES or len(keys) % KEY_BYTES:
        return None
    return as_keys(keys), words(locations)


def file_name(slab: int, writer: str) -> str:
    """The file of a slab."""
    return f"{slab:010x}.{writer}.slab"


def parse_name(name: str) -> tuple[int, str] | None:
    """Number and writer of the slab whose file has this name; None if it is not one's. A number of more than SLAB_BITS
    is no slab's: the file only takes room."""
    match = _NAME.fullmatch(name)
    return (int(match[1], 16), match[2]) if match else None
