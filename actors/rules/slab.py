"""The bytes of a slab: a file of equal preallocated slots, one block each, every one of which proves itself.

    slab  64-byte header, then `num_slots` times: 64-byte slot header, payload

A slot of zeros is free, as a new file's are; freeing one is writing `FREE` over its header. A block is written over a
free header, and its own header last. That has a checksum of its own, so that an index can be rebuilt without reading
payloads, and another one over header and payload, without which no payload is given out.
So a torn, mixed or damaged slot is a miss, and never another block's content. All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from isal.isal_zlib import crc32

from actors.rules.chain import KEY_BYTES

FORMAT_VERSION = 1
HEADER_BYTES = 64
"""Of a slab's header and of a slot's."""
FREE = bytes(HEADER_BYTES)
"""The header of a free slot."""

Buffer = bytes | bytearray | memoryview
Check = Literal["short", "magic", "version", "free", "layout", "epoch", "key", "checksum"]

_SLAB = struct.Struct("<8sIIQQ16s12xI")  # magic, version, payload bytes, slots, epoch, layout, checksum
_SLAB_MAGIC = b"shoalkv\n"
_SLOT = struct.Struct("<4sI16s16sQ8sII")  # magic, flags, key, parent, epoch, layout, checksum of all, of the header
_SLOT_MAGIC = b"blok"
_COVERED = HEADER_BYTES - 8
"""How much of a slot's header the checksum of all covers: what stands before it."""
_CHECKSUM = struct.Struct("<I")
_APPROXIMATE = 1


class SlotError(Exception):
    """These bytes are not the block, or slab, that was asked for; `check` is what they failed."""

    def __init__(self, check: Check, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check: Check = check


def layout_of(space: str) -> bytes:
    """The digest of a layout: `space` names the weights and how their blocks are laid out (`EngineInfo.space`)."""
    return hashlib.sha256(space.encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class Slab:
    """What all slots of a file have in common: the file's header.

    `layout` is what `layout_of` says; `epoch` is the latest of the slab's writers, each of which takes a higher one and
    writes it here before its first slot.
    """

    payload_bytes: int
    num_slots: int
    layout: bytes
    epoch: int

    def __post_init__(self) -> None:
        if len(self.layout) != 16:
            raise ValueError(f"a layout's digest has 16 bytes, not {len(self.layout)}")

    @property
    def slot_bytes(self) -> int:
        """Of a slot, its header included."""
        return HEADER_BYTES + self.payload_bytes

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return HEADER_BYTES + self.num_slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where in the file a slot starts. Raises IndexError for one it does not have."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        return HEADER_BYTES + slot * self.slot_bytes

    def pack(self) -> bytes:
        """The file's first `HEADER_BYTES`."""
        fields = (_SLAB_MAGIC, FORMAT_VERSION, self.payload_bytes, self.num_slots, self.epoch, self.layout, 0)
        covered = _SLAB.pack(*fields)[: -_CHECKSUM.size]
        return covered + _CHECKSUM.pack(crc32(covered))

    @classmethod
    def unpack(cls, data: Buffer) -> Self:
        """The slab whose file starts with `data`. Raises SlotError: `short`, `magic`, `checksum` or `version`."""
        if len(data) < HEADER_BYTES:
            raise SlotError("short", f"{len(data)} bytes of a slab's header")
        magic, version, payload_bytes, num_slots, epoch, layout, checksum = _SLAB.unpack_from(data)
        if magic != _SLAB_MAGIC:
            raise SlotError("magic", f"no slab starts with {magic!r}")
        if checksum != crc32(memoryview(data)[: HEADER_BYTES - _CHECKSUM.size]):
            raise SlotError("checksum", "of a slab's header")
        if version != FORMAT_VERSION:
            raise SlotError("version", f"{version}, this is {FORMAT_VERSION}")
        return cls(payload_bytes, num_slots, layout, epoch)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a whole slot says of its block. `epoch` is the writer's; an `approximate` block comes from a replay."""

    key: bytes
    parent: bytes
    approximate: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A whole slot; `payload` is a view of the bytes that were read, not a copy."""

    header: SlotHeader
    payload: memoryview


def pack_header(slab: Slab, key: bytes, parent: bytes, payload: Buffer, *, approximate: bool) -> bytes:
    """The header of a slot that the slab's present writer writes. Raises ValueError for a wrong size."""
    if len(key) != KEY_BYTES or len(parent) != KEY_BYTES:
        raise ValueError(f"keys of {len(key)} and {len(parent)} bytes, expected {KEY_BYTES}")
    if len(payload) != slab.payload_bytes:
        raise ValueError(f"a payload of {len(payload)} bytes, expected {slab.payload_bytes}")
    flags = _APPROXIMATE if approximate else 0
    covered = _SLOT.pack(_SLOT_MAGIC, flags, key, parent, slab.epoch, slab.layout[:8], 0, 0)[:_COVERED]
    header = covered + _CHECKSUM.pack(crc32(payload, crc32(covered)))
    return header + _CHECKSUM.pack(crc32(header))


def unpack_header(data: Buffer, slab: Slab) -> SlotHeader:
    """What the slot starting with `data` says of itself; nothing of its payload is proven by that.

    Raises SlotError: `short`, `free`, `magic`, `checksum`, `layout`, or `epoch` when its writer is later than `slab`
    knows: then the file's header is to be read again.
    """
    if len(data) < HEADER_BYTES:
        raise SlotError("short", f"{len(data)} bytes of a slot's header")
    magic, flags, key, parent, epoch, layout, _, checksum = _SLOT.unpack_from(data)
    if magic == FREE[: len(magic)]:
        raise SlotError("free", "no block is here")
    if magic != _SLOT_MAGIC:
        raise SlotError("magic", f"no slot starts with {magic!r}")
    if checksum != crc32(memoryview(data)[: HEADER_BYTES - _CHECKSUM.size]):
        raise SlotError("checksum", "of a slot's header")
    if layout != slab.layout[:8]:
        raise SlotError("layout", f"{layout.hex()}, expected {slab.layout[:8].hex()}")
    if epoch > slab.epoch:
        raise SlotError("epoch", f"{epoch}, the slab's is {slab.epoch}")
    return SlotHeader(key, parent, bool(flags & _APPROXIMATE), epoch)


def read_slot(data: Buffer, slab: Slab, key: bytes | None = None) -> Slot:
    """The whole slot that `data` starts with, of the block `key`, or of any. `data` is what was read, not a mapping of
    the file: what is proven here must not change afterwards.

    Raises SlotError as `unpack_header` does, and `short`, `key`, or `checksum` for the payload's.
    """
    header = unpack_header(data, slab)
    if key is not None and header.key != key:
        raise SlotError("key", f"{header.key.hex()}, expected {key.hex()}")
    if len(data) < slab.slot_bytes:
        raise SlotError("short", f"{len(data)} bytes of a slot of {slab.slot_bytes}")
    view = memoryview(data).toreadonly()
    payload = view[HEADER_BYTES : slab.slot_bytes]
    if _CHECKSUM.unpack_from(data, _COVERED)[0] != crc32(payload, crc32(view[:_COVERED])):
        raise SlotError("checksum", f"of block {header.key.hex()}")
    return Slot(header, payload)


def scan_headers(headers: Sequence[Buffer], slab: Slab, first: int = 0) -> Iterator[tuple[int, SlotHeader]]:
    """Of slots in a row, the first of which has the number `first`: those with a block, and what their headers say.

    Free and damaged slots are left out: both may be written.
    """
    for slot, data in enumerate(headers, first):
        try:
            header = unpack_header(data, slab)
        except SlotError:
            continue
        yield slot, header
