"""The encoder that computes: the image tower of a checkpoint, in one thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kernels.config import ConfigError, ModelConfig
from kernels.engine import Pixels
from kernels.thread import ComputeThread
from kernels.vision import VisionEncoder, load_vision


class LocalEncoder:
    """The Encoder contract over a checkpoint folder. Cancelling a call waits for the image at hand, no longer."""

    def __init__(self, folder: str | Path, *, num_threads: int = 1) -> None:
        """Reads only config.json; `start` loads the weights of the tower, no others. Raises ConfigError."""
        self._folder = Path(folder)
        config = ModelConfig.from_folder(self._folder).vision
        if config is None:
            raise ConfigError(f"{self._folder / 'config.json'}: vision_config is missing")
        self._smallest = (config.patch_size, config.patch_size, 3)
        self._thread = ComputeThread("encoder", num_threads)
        self._vision: VisionEncoder | None = None

    async def start(self) -> None:
        """Load the weights and encode a small image. Raises CheckpointError."""
        self._vision = await self._thread.run(self._load)

    async def encode(self, images: Sequence[Pixels]) -> list[bytes]:
        if self._vision is None:
            raise RuntimeError("the encoder is not started, or closed")
        for image in images:
            self._vision.check(image)
        return [await self._thread.run(partial(_rows, self._vision, image)) for image in images]

    async def close(self) -> None:
        self._thread.close()
        self._vision = None

    def _load(self) -> VisionEncoder:
        vision = load_vision(self._folder)
        vision.encode(np.zeros(self._smallest, dtype=np.uint8))
        return vision


def _rows(vision: VisionEncoder, pixels: Pixels) -> bytes:
    return vision.encode(pixels).numpy().astype("<f4", copy=False).tobytes()
