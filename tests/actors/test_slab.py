"""Slots on disk: one that is damaged, cut off, torn or another's is never taken for the block asked for."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rules.slab import FREE, HEADER_BYTES, Buffer, Slab, SlotError, read_slot, scan_headers
from actors.rules.slab import unpack_header as unpack
from tests.actors.builders import pack_slot

LAYOUT = hashlib.sha256(b"layout-1").digest()[:16]
SLAB = Slab(payload_bytes=48, num_slots=4, layout=LAYOUT, epoch=7)
KEY, PARENT = bytes(range(16)), bytes(range(16, 32))
PAYLOAD = bytes(range(100, 148))
SLOT = pack_slot(SLAB, KEY, PARENT, PAYLOAD, approximate=True)


def failed(data: Buffer, slab: Slab = SLAB, key: bytes | None = KEY) -> str:
    with pytest.raises(SlotError) as caught:
        read_slot(data, slab, key)
    assert str(caught.value).startswith(f"{caught.value.check}: ")
    return caught.value.check


def test_golden_bytes() -> None:
    """Written slabs look like this: other bytes are another format version."""
    assert SLOT.hex() == (
        "626c6f6b" "01000000" "000102030405060708090a0b0c0d0e0f" "101112131415161718191a1b1c1d1e1f"
        "0700000000000000" "5638e29a29d4ad6b" "a8b8bbaf" "9f378d3b"
        "6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f90919293"
    )  # fmt: skip
    assert SLAB.pack().hex() == (
        "73686f616c6b760a" "01000000" "30000000" "0400000000000000" "0700000000000000"
        "5638e29a29d4ad6b152fa748c379b91d" "000000000000000000000000" "de8a8757"
    )  # fmt: skip


@given(st.binary(max_size=200), st.binary(min_size=16, max_size=16), st.booleans(), st.integers(0, 2**64 - 1))
@settings(max_examples=30)
def test_what_was_packed_is_read(payload: bytes, key: bytes, approximate: bool, epoch: int) -> None:
    slab = Slab(len(payload), 1, LAYOUT, epoch)
    data = pack_slot(slab, key, PARENT, payload, approximate=approximate)
    assert len(data) == slab.slot_bytes
    slot = read_slot(data + b"what follows", slab, key)
    assert slot.payload == payload and slot.payload.readonly
    header = slot.header
    assert (header.key, header.parent, header.approximate, header.epoch) == (key, PARENT, approximate, epoch)
    assert read_slot(data, slab).header == unpack(data[:HEADER_BYTES], slab) == header


@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_no_flipped_byte_is_accepted(bits: int) -> None:
    for at in range(len(SLOT)):
        data = bytearray(SLOT)
        data[at] ^= bits
        # With any key: the key's own check must not be what saves it.
        assert failed(data, key=None) == ("magic" if at < 4 else "checksum"), at
        if at < HEADER_BYTES:
            with pytest.raises(SlotError):
                unpack(data, SLAB)


def test_no_truncated_slot_is_accepted() -> None:
    assert {failed(SLOT[:length], key=None) for length in range(len(SLOT))} == {"short"}


def test_no_slot_torn_between_two_blocks_is_accepted() -> None:
    """At any byte, either way round: a written slot whose writer was killed, or a read that met a write."""
    other = pack_slot(SLAB, PARENT, KEY, PAYLOAD[::-1], approximate=False)
    for at in range(1, len(SLOT)):
        for torn in (SLOT[:at] + other[at:], other[:at] + SLOT[at:], SLOT[:at] + bytes(len(SLOT) - at)):
            if torn not in (SLOT, other):
                failed(torn, key=None)


def test_a_payload_under_another_header_is_not_accepted() -> None:
    other = pack_slot(SLAB, KEY, PARENT, PAYLOAD[::-1], approximate=True)
    assert failed(SLOT[:HEADER_BYTES] + other[HEADER_BYTES:]) == "checksum"


def test_a_header_with_fresh_checksum_over_an_old_payload_checksum_is_not_accepted() -> None:
    """The checksum of all covers the header too: an exact block's payload stays exact, an approximate one's not."""
    data = bytearray(SLOT)
    data[4] = 0
    data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    assert unpack(data, SLAB).approximate is False
    assert failed(data) == "checksum"


def test_another_block_is_a_miss() -> None:
    assert failed(SLOT, key=PARENT) == "key"


def test_another_layout_is_a_miss() -> None:
    assert failed(SLOT, replace(SLAB, layout=LAYOUT[::-1])) == "layout"


def test_a_later_writer_than_the_slab_knows_is_a_miss_and_an_earlier_is_not() -> None:
    assert failed(SLOT, replace(SLAB, epoch=6)) == "epoch"
    assert read_slot(SLOT, replace(SLAB, epoch=8), KEY).header.epoch == 7


def test_a_free_slot_is_a_miss() -> None:
    assert failed(bytes(SLAB.slot_bytes)) == failed(FREE + SLOT[HEADER_BYTES:]) == "free"


@pytest.mark.parametrize("at", range(HEADER_BYTES))
def test_a_damaged_slab_header_is_refused(at: int) -> None:
    data = bytearray(SLAB.pack())
    assert Slab.unpack(data + b"slots") == SLAB
    data[at] ^= 0x10
    with pytest.raises(SlotError, match="magic:" if at < 8 else "checksum:"):
        Slab.unpack(data)
    with pytest.raises(SlotError, match="short:"):
        Slab.unpack(SLAB.pack()[:at])


def test_another_version_is_refused() -> None:
    data = bytearray(SLAB.pack())
    data[8] = 2
    data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    with pytest.raises(SlotError, match="version: 2"):
        Slab.unpack(data)


def test_wrong_sizes_are_refused() -> None:
    for key, parent, payload in ((KEY[1:], PARENT, PAYLOAD), (KEY, b"", PAYLOAD), (KEY, PARENT, PAYLOAD + b"x")):
        with pytest.raises(ValueError, match="expected"):
            pack_slot(SLAB, key, parent, payload, approximate=False)
    with pytest.raises(ValueError, match="16 bytes"):
        Slab(48, 4, b"short", 0)
    for slot in (-1, 4):
        with pytest.raises(IndexError):
            SLAB.offset(slot)


def test_a_scan_finds_the_headers_that_are_whole() -> None:
    keys = [bytes([number]) * 16 for number in range(4)]
    headers = [bytearray(FREE) for _ in range(4)]
    assert list(scan_headers(headers, SLAB)) == []
    for slot in (0, 1, 3):
        data = pack_slot(SLAB, keys[slot], PARENT, PAYLOAD, approximate=slot == 3)
        headers[slot] = bytearray(data[:HEADER_BYTES])
    found = list(scan_headers(headers, SLAB))
    assert [(slot, header.key, header.approximate) for slot, header in found] == [
        (0, keys[0], False),
        (1, keys[1], False),
        (3, keys[3], True),
    ]
    assert [slot for slot, _ in scan_headers(headers[1:], SLAB, first=11)] == [11, 13]
    headers[1][20] ^= 1
    assert [slot for slot, _ in scan_headers(headers, SLAB)] == [0, 3]
    headers[3] = headers[3][:-1]
    assert [slot for slot, _ in scan_headers(headers, SLAB)] == [0]


@pytest.mark.parametrize("payload_bytes", [10_176, 113_920])
def test_headers_take_less_than_a_hundredth(payload_bytes: int) -> None:
    slab = Slab(payload_bytes, 100, LAYOUT, 1)
    assert slab.file_bytes <= 1.01 * slab.num_slots * payload_bytes
