"""An encoder without a model, and images for it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from kernels.engine import Pixels
from kernels.vision_config import VisionConfig

CONFIG = VisionConfig(
    num_hidden_layers=1,
    hidden_size=8,
    num_attention_heads=1,
    intermediate_size=8,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=7056,
)
HIDDEN_SIZE = 4


def num_tokens(width: int, height: int) -> int:
    """Of an image of a size that CONFIG plans."""
    cell = CONFIG.patch_size * CONFIG.downsample_ratio
    return -(-height // cell) * (-(-width // cell) + 1) + 2


class FakeEncoder:
    """Rows that are a digest of the pixels. While `gate` is clear it encodes nothing; `error` is raised once."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_it = asyncio.Event()
        self.error: Exception | None = None
        self.is_closed = False

    async def start(self) -> None:
        pass

    async def encode(self, images: Sequence[Pixels]) -> list[bytes]:
        self.at_it.set()
        await self.gate.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [self._rows(image) for image in images]

    def _rows(self, image: Pixels) -> bytes:
        height, width, channels = image.shape
        assert channels == 3
        digest = hashlib.sha256(image.tobytes()).digest()
        self.encoded.append(digest.hex())
        return (digest * HIDDEN_SIZE)[: 4 * HIDDEN_SIZE] * num_tokens(width, height)

    async def close(self) -> None:
        self.is_closed = True
