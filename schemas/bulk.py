"""Bytes too large for a message: a handle to pull them by, or the bytes themselves when they fit."""

from __future__ import annotations

from schemas.message import Message


class Handle(Message, frozen=True):
    """A claim ticket for bytes held by their owner until ACK or the end of the lease.

    `address` is `tcp://host:port` or `mem://name`. `generation` changes whenever the owner re-uses `key`, so a late
    reader gets an error and never other bytes. `checksum` is the CRC-32 of the whole payload.
    """

    address: str
    key: str
    generation: int
    size_bytes: int
    checksum: int


class Payload(Message, frozen=True):
    """Bytes, inline when they fit in a message, else by handle. Exactly one of the two is set."""

    inline: bytes = b""
    handle: Handle | None = None

    @property
    def size_bytes(self) -> int:
        """How many bytes there are, here or there."""
        return len(self.inline) if self.handle is None else self.handle.size_bytes
