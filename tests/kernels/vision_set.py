"""The golden checkpoint with an image tower: its prompts, and the rows that stand for its images."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from kernels.batch import Images
from tests.kernels.conftest import GOLDEN

FOLDER = GOLDEN / "mini-vision"
NUM_IMAGES, PROMPTS = 4, ("v0", "v1", "v2", "v3", "v4")
Dtype = Literal["fp32", "bf16"]
Rows = npt.NDArray[np.float32]


@cache
def golden() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "vision.safetensors")


@cache
def delimiters() -> dict[int, torch.Tensor]:
    """The learned rows by their published type: 0 starts a span, 2 ends a line, 3 ends the span; 1 is a cell."""
    weights = load_file(FOLDER / "model.safetensors")
    return {0: weights["image_start"], 2: weights["image_newline"], 3: weights["image_end"]}


def span(image: int, dtype: Dtype = "fp32") -> Rows:
    """The golden rows of an image's whole span, [num_tokens, hidden_size]."""
    types = golden()[f"img{image}.types"]
    cells = golden()[f"img{image}.embeddings_fp32" if dtype == "fp32" else f"img{image}.embeddings"]
    rows = torch.empty(len(types), cells.shape[1])
    for kind, row in delimiters().items():
        rows[types == kind] = row.float()
    rows[types == 1] = cells.float()
    return rows.numpy()


def tokens(prompt: str) -> list[int]:
    return [int(token) for token in golden()[f"{prompt}.tokens"]]


def images(prompt: str, slot: int, dtype: Dtype = "fp32") -> Images:
    """What a batch with the prompt in `slot` is given."""
    starts, numbers = golden()[f"{prompt}.image_starts"].tolist(), golden()[f"{prompt}.image_ids"].tolist()
    return {slot: [(start, span(number, dtype)) for start, number in zip(starts, numbers, strict=True)]}
