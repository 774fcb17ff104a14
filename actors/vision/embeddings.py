"""What images were encoded to, for who asks again."""

from __future__ import annotations

from dataclasses import dataclass

from actors.vision.queue import Key

MAX_CACHED_BYTES = 256 * 1024 * 1024
"""A dozen of the largest images of the real model, whose rows take 20 MiB. What a conversation has seen is in its
cached prefix, and not asked for again: this is for images that many requests have, and for what is done twice."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The embeddings of an image, fp32 [num_tokens, hidden_size], and their CRC-32."""

    data: bytes
    checksum: int


class Embeddings:
    """Rows by image; what was used least lately goes first.

    The tower's arithmetic is the same each time, so that these are what it would give again, to the bit.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._rows: dict[Key, Rows] = {}

    def get(self, key: Key) -> Rows | None:
        """The rows of an image, if they are here."""
        if (rows := self._rows.pop(key, None)) is not None:
            self._rows[key] = rows
        return rows

    def add(self, key: Key, rows: Rows) -> None:
        """Keep them, unless they alone are too much. No image is added twice: who asks for one that is here gets it."""
        if len(rows.data) > MAX_CACHED_BYTES:
            return
        self._rows[key] = rows
        self.num_bytes += len(rows.data)
        while self.num_bytes > MAX_CACHED_BYTES:
            self.num_bytes -= len(self._rows.pop(next(iter(self._rows))).data)
