"""The image tower: pixels to the rows that stand for an image in a prompt (spec §9).

One image at a time: its rows cannot depend on others, and the shapes of all products are its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from kernels.checkpoint import Checkpoint
from kernels.config import ConfigError, ModelConfig
from kernels.engine import Pixels
from kernels.model import ComputeDtype
from kernels.ops.rounding import Rounding, keep, rms_norm, silu, to_bf16
from kernels.projection import Projection
from kernels.vision_config import VisionConfig

_EPS = 1e-6
_QUERY_ROWS = 64  # whose scores are held at once: those of a large image are gigabytes, these stay in the cache


class _Rotation(NamedTuple):
    """Of each patch, by its row and its column: [patches, 1, head_dim / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class _Linear:
    """A matrix [n, k], with a bias [n] or without; its result rounded once."""

    def __init__(self, checkpoint: Checkpoint, name: str, n: int, k: int, rounding: Rounding, *, bias: bool) -> None:
        self.round = rounding
        self.matrix = Projection(checkpoint.matrix(name, n, k))
        self.bias = checkpoint.tensor(f"{name}.bias", n) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, k] -> [rows, n]."""
        (out,) = self.matrix.forward(x)
        return self.round(out if self.bias is None else out + self.bias)


class _Block:
    """Weights of `vision.blocks.{i}`: attention of every patch to every patch, then a gated MLP, each behind a norm."""

    def __init__(self, config: VisionConfig, checkpoint: Checkpoint, name: str, rounding: Rounding) -> None:
        self.config, self.round = config, rounding
        dim, inter = config.hidden_size, config.intermediate_size
        self.norm1 = checkpoint.tensor(f"{name}.norm1.weight", dim)
        self.norm2 = checkpoint.tensor(f"{name}.norm2.weight", dim)
        self.wqkv = _Linear(checkpoint, f"{name}.attn.wqkv", 3 * dim, dim, rounding, bias=True)
        self.wo = _Linear(checkpoint, f"{name}.attn.wo", dim, dim, rounding, bias=True)
        self.w1 = _Linear(checkpoint, f"{name}.mlp.w1", 2 * inter, dim, rounding, bias=False)
        self.w2 = _Linear(checkpoint, f"{name}.mlp.w2", dim, inter, rounding, bias=False)

    def forward(self, x: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
        """`x` [patches, dim] -> the same."""
        r = self.round
        x = r(x + self._attend(rms_norm(x, self.norm1, _EPS, r), rotation))
        gate, up = self.w1.forward(rms_norm(x, self.norm2, _EPS, r)).chunk(2, -1)
        return r(x + self.w2.forward(r(r(silu(gate)) * up)))

    def _attend(self, x: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
        shape = (len(x), self.config.num_attention_heads, -1)
        q, k, v = (part.reshape(shape) for part in self.wqkv.forward(x).chunk(3, -1))
        out = _attend_all(self.round(_rotate(q, rotation)), self.round(_rotate(k, rotation)), v)
        return self.wo.forward(self.round(out.flatten(1)))


class VisionEncoder:
    """Weights of `vision.*`, `aligner.*` and the delimiters of a span; immutable.

    `compute_dtype` "bf16" rounds activations where the published model does, "fp32" rounds none of them.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, compute_dtype: ComputeDtype) -> None:
        """Reads these tensors and no others. Raises ConfigError without a tower, and CheckpointError."""
        if config.vision is None:
            raise ConfigError("vision_config is missing")
        self.round = rounding = to_bf16 if compute_dtype == "bf16" else keep
        self.config = c = config.vision
        dim, out, cell = c.hidden_size, config.hidden_size, c.hidden_size * c.downsample_ratio**2
        area = 3 * c.patch_size**2
        self.patch_embed = _Linear(checkpoint, "vision.patch_embed.proj", dim, area, rounding, bias=True)
        self.blocks = [
            _Block(c, checkpoint, f"vision.blocks.{layer}", rounding) for layer in range(c.num_hidden_layers)
        ]
        self.norm = checkpoint.tensor("vision.norm.weight", dim)
        self.w1 = _Linear(checkpoint, "aligner.w1", out, cell, rounding, bias=True)
        self.w2 = _Linear(checkpoint, "aligner.w2", out, out, rounding, bias=True)
        self.start = checkpoint.tensor("image_start", out)
        self.newline = checkpoint.tensor("image_newline", out)
        self.end = checkpoint.tensor("image_end", out)
        pairs = dim // c.num_attention_heads // 4  # of dimensions that turn with the row; as many turn with the column
        self.freqs = 1.0 / (c.rope_theta ** (torch.arange(pairs, dtype=torch.float32) / pairs))
        # The model reads BF16 pixels in every mode.
        self.brightness = to_bf16((torch.arange(256) / 255 - 0.5) / 0.5).numpy()

    def check(self, pixels: Pixels) -> None:
        """Raises ValueError for anything but uint8 [height, width, 3] of a size that the model takes."""
        shape, patch = pixels.shape, self.config.patch_size
        if pixels.dtype != np.uint8 or len(shape) != 3 or shape[2] != 3:
            raise ValueError(f"an image is uint8 [height, width, 3], not {pixels.dtype} {list(shape)}")
        if shape[0] % patch or shape[1] % patch or not shape[0] or not shape[1]:
            raise ValueError(f"the sides of an image are multiples of {patch} pixels, not {shape[0]} and {shape[1]}")
        rows, columns = (-(-side // patch // self.config.downsample_ratio) for side in shape[:2])
        if rows * (columns + 1) + 2 > self.config.max_image_tokens:
            raise ValueError(f"{shape[1]} x {shape[0]} pixels exceed {self.config.max_image_tokens} tokens")

    @torch.inference_mode()
    def encode(self, pixels: Pixels) -> torch.Tensor:
        """uint8 [height, width, 3] -> fp32 [num_tokens, hidden_size]: the whole span, delimiters included.

        Raises ValueError as `check` does.
        """
        self.check(pixels)
        rows, columns = (side // self.config.patch_size for side in pixels.shape[:2])
        x = self.tower(self.patches(pixels), rows, columns)
        cells = self.align(x, rows, columns)
        num_rows = -(-rows // self.config.downsample_ratio)
        grid = cells.view(num_rows, -1, cells.shape[-1])
        lines = torch.cat((grid, self.newline.expand(num_rows, 1, -1)), 1)
        return torch.cat((self.start[None], lines.flatten(0, 1), self.end[None]))

    def patches(self, pixels: Pixels) -> torch.Tensor:
        """uint8 [height, width, 3] -> [patches, 3 * patch * patch], a patch by channel, row, column."""
        patch = self.config.patch_size
        rows, columns = (side // patch for side in pixels.shape[:2])
        grid = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return torch.from_numpy(self.brightness[grid.reshape(rows * columns, -1)])

    def tower(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[rows * columns, 3 * patch * patch] -> [rows * columns, vision hidden_size], normed."""
        x = self.patch_embed.forward(patches)
        down = torch.arange(rows)[:, None, None] * self.freqs
        across = torch.arange(columns)[None, :, None] * self.freqs
        angles = torch.cat((down.expand(rows, columns, -1), across.expand(rows, columns, -1)), -1).view(len(x), 1, -1)
        rotation = _Rotation(angles.cos(), angles.sin())
        for block in self.blocks:
            x = block.forward(x, rotation)
        return rms_norm(x, self.norm, _EPS, self.round)

    def align(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[rows * columns, vision hidden_size] -> [cells, hidden_size]; cells that reach past the edge see zeros."""
        ratio = self.config.downsample_ratio
        grid = functional.pad(x.view(rows, columns, -1), (0, 0, 0, -columns % ratio, 0, -rows % ratio))
        down, across = grid.shape[0] // ratio, grid.shape[1] // ratio
        cells = grid.view(down, ratio, across, ratio, -1).permute(0, 2, 4, 1, 3).reshape(down * across, -1)
        return self.w2.forward(self.round(functional.gelu(self.w1.forward(cells))))


def _rotate(x: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
    """`x` [patches, heads, head_dim]: dimension k turns with the one half of the head further on."""
    first, second = x.chunk(2, -1)
    cos, sin = rotation
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of every row to every row: [rows, heads, head_dim] each.

    Three to eight times as fast here as torch's own, which takes 3.7 s for 8,418 rows and two heads of 32.
    """
    out = torch.empty_like(q)
    q = q * q.shape[2] ** -0.5
    for head in range(q.shape[1]):
        queries, keys, values = q[:, head].contiguous(), k[:, head].t().contiguous(), v[:, head].contiguous()
        for first in range(0, len(q), _QUERY_ROWS):
            scores = torch.mm(queries[first : first + _QUERY_ROWS], keys)
            out[first : first + _QUERY_ROWS, head] = torch.mm(scores.softmax(-1), values)
    return out


def load_vision(folder: str | Path, *, compute_dtype: ComputeDtype = "fp32") -> VisionEncoder:
    """The image tower of a checkpoint folder, without its text weights. Raises ConfigError and CheckpointError."""
    return VisionEncoder(ModelConfig.from_folder(folder), Checkpoint(folder), compute_dtype)
