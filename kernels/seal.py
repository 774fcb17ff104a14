"""The envelope of exported state: which layout it has, and that it arrived whole."""

from __future__ import annotations

import struct

from isal.isal_zlib import crc32

from kernels.engine import StateError

_MAGIC = b"SHOALSTA"
_HEAD = struct.Struct("<8sIH")  # magic, checksum of all that follows, bytes of the layout's name


def seal(layout: str, body: bytes) -> bytes:
    """Wrap `body` for engines whose layout is `layout`."""
    name = layout.encode()
    return _HEAD.pack(_MAGIC, crc32(body, crc32(name)), len(name)) + name + body


def unseal(layout: str, state: bytes) -> memoryview:
    """The body that was sealed for `layout`. Raises StateError when damaged, or sealed for another layout."""
    if len(state) < _HEAD.size:
        raise StateError(f"state of {len(state)} bytes is damaged: shorter than its header")
    magic, checksum, name_bytes = _HEAD.unpack_from(state)
    if magic != _MAGIC:
        raise StateError("not a state: its first bytes are wrong")
    rest = memoryview(state)[_HEAD.size :]
    if crc32(rest) != checksum:
        raise StateError(f"state of {len(state)} bytes is damaged: its checksum does not match")
    name = bytes(rest[:name_bytes]).decode()
    if name != layout:
        raise StateError(f"state has layout {name!r}, this engine's is {layout!r}")
    return rest[name_bytes:]
