"""Images of clients, and an encoder without a model: rows that are a digest of the pixels."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

from actors.vision.images import prepare
from kernels.engine import Pixels
from kernels.vision_config import VisionConfig

CONFIG = VisionConfig(
    num_hidden_layers=1,
    hidden_size=4,
    num_attention_heads=1,
    intermediate_size=4,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=84 * 84,
)
NUM_IMAGES = 3
TOKEN = 99
"""In place of an image in prompts."""

ENCODE_S = 0.05


class ChaosEncoder:
    """See `kernels.engine.Encoder`."""

    async def start(self) -> None:
        """It is there."""

    async def encode(self, images: Sequence[Pixels]) -> list[bytes]:
        """Takes time."""
        await asyncio.sleep(ENCODE_S * len(images))
        return [rows(image) for image in images]

    async def close(self) -> None:
        """There is nothing to let go of."""


@cache
def file(number: int) -> bytes:
    """Image number so and so, as a client sends it: of two sizes."""
    pixels = np.random.default_rng(number).integers(0, 256, (84, 84 + 42 * (number % 2), 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


@cache
def seen(number: int) -> tuple[int, bytes]:
    """The tokens of an image's span, and its rows."""
    prepared = prepare(file(number), CONFIG)
    return prepared.plan.num_tokens, rows(prepared.pixels)


def rows(pixels: Pixels) -> bytes:
    """Four numbers a token."""
    cell = CONFIG.patch_size * CONFIG.downsample_ratio
    height, width, _ = pixels.shape
    num_tokens: int = -(-height // cell) * (-(-width // cell) + 1) + 2
    digest = hashlib.sha256(pixels.tobytes()).digest()
    return digest[:16] * num_tokens
