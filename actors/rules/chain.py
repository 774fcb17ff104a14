"""The names of blocks: each digest stands for all tokens up to the end of its block, and for whose cache they are in.

`h[-1]` is a root; `h[i] = SHA-256(h[i-1] ‖ tokens of block i as u32 LE ‖ digests of the images that overlap
it)`, cut to 128 bits (design §5). 64 bits would meet by chance at the sizes this is for (spec serving.md §3, K2).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.engine import BLOCK_TOKENS as BLOCK_TOKENS

KEY_BYTES = 16
_DOMAIN = b"shoal block 1"
_BLOCK = struct.Struct(f"{4 * BLOCK_TOKENS}s")


def root(space: str, salt: bytes = b"") -> bytes:
    """What the first block's digest starts from: blocks under different roots never have a key in common.

    `space` names the weights and the bytes of a block (`EngineInfo.space`); `salt` whose cache it is.
    """
    parts = (_DOMAIN, space.encode(), BLOCK_TOKENS.to_bytes(4, "little"), salt)
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
    blocks: Iterable[tuple[bytes]] = _BLOCK.iter_unpack(data)
    if marks:
        blocks = [(block + marks.get(number, b""),) for number, (block,) in enumerate(blocks)]
    new, cut, key = hashlib.sha256, slice(KEY_BYTES), root
    return [key := new(key + block).digest()[cut] for (block,) in blocks]


def link(parent: bytes, block: bytes, digests: bytes = b"") -> bytes:
    """The key of one block behind `parent`: its tokens as u32 little-endian, and the digests of images that overlap it,
    one after the other."""
    return hashlib.sha256(parent + block + digests).digest()[:KEY_BYTES]


def tail_digests(images: Sequence[Span], num_tokens: int) -> bytes:
    """For `link`: the digests of the images that overlap the incomplete last block of a prompt of `num_tokens`."""
    first = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return b"".join(image.digest for image in images if image.start + image.num_tokens > first)


def _marks(images: Sequence[Span], num_blocks: int) -> dict[int, bytes]:
    """Block number -> digests of the images that overlap it."""
    marks: dict[int, bytes] = {}
    for image in images:
        last = (image.start + image.num_tokens - 1) // BLOCK_TOKENS
        for block in range(image.start // BLOCK_TOKENS, min(last + 1, num_blocks)):
            marks[block] = marks.get(block, b"") + image.digest
    return marks
