"""The names of blocks: each digest stands for all tokens up to the end of its block, and for whose cache they are in.

`h[-1]` is a space's root; `h[i] = SHA-256(h[i-1] ‖ tokens of block i as u32 LE ‖ digests of the images that overlap
it)`, cut to 128 bits (design §5). 64 bits would meet by chance at the sizes this is for (spec serving.md §3, K2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 128
KEY_BYTES = 16
_DOMAIN = b"shoal block 1"


@dataclass(frozen=True, slots=True)
class Space:
    """Whose cache, of what: blocks of different spaces never have a key in common.

    `model` names the weights, `layout` the bytes of a block, `salt` the tenant (empty: shared by all).
    """

    model: str
    layout: str
    salt: bytes = b""

    @property
    def root(self) -> bytes:
        """What the first block's digest starts from."""
        parts = (_DOMAIN, self.model.encode(), self.layout.encode(), BLOCK_TOKENS.to_bytes(4, "little"), self.salt)
        framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.sha256(framed).digest()[:KEY_BYTES]


@dataclass(frozen=True, slots=True)
class Span:
    """An image in a prompt: `digest` covers its pixels and the revisions of what turns them into embeddings."""

    start: int
    num_tokens: int
    digest: bytes


def chain(root: bytes, tokens: npt.NDArray[np.uint32], images: Sequence[Span] = ()) -> list[bytes]:
    """The keys of all complete blocks of `tokens`, in order; `images` in the order of their spans."""
    num_blocks = len(tokens) // BLOCK_TOKENS
    data = np.ascontiguousarray(tokens[: num_blocks * BLOCK_TOKENS], dtype="<u4").tobytes()
    marks = _marks(images, num_blocks)
    size, new, key, keys = 4 * BLOCK_TOKENS, hashlib.sha256, root, []
    for start in range(0, len(data), size):
        block = key + data[start : start + size]
        if marks and (digests := marks.get(start // size)):
            block += digests
        key = new(block).digest()[:KEY_BYTES]
        keys.append(key)
    return keys


def _marks(images: Sequence[Span], num_blocks: int) -> dict[int, bytes]:
    """Block number -> digests of the images that overlap it."""
    marks: dict[int, bytes] = {}
    for image in images:
        last = (image.start + image.num_tokens - 1) // BLOCK_TOKENS
        for block in range(image.start // BLOCK_TOKENS, min(last + 1, num_blocks)):
            marks[block] = marks.get(block, b"") + image.digest
    return marks
