"""The image tower with gradients (spec §9): pixels to the rows that stand for images in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kernels.vision_config import VisionConfig
from run.train.layers import Weights

_EPS = 1e-6


def encode(w: Weights, config: VisionConfig, images: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
    """uint8 [height, width, 3] each -> [n, hidden_size], the spans of all images, delimiters included."""
    spans: list[torch.Tensor] = [torch.empty(0)] * len(images)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, image in enumerate(images):
        by_shape.setdefault(image.shape, []).append(number)
    for numbers in by_shape.values():
        together = _spans(w, config, torch.from_numpy(np.stack([images[number] for number in numbers])))
        for number, span in zip(numbers, together, strict=True):
            spans[number] = span
    return torch.cat(spans)


def _spans(w: Weights, c: VisionConfig, pixels: torch.Tensor) -> torch.Tensor:
    """Images of one size, uint8 [n, height, width, 3] -> [n, tokens, hidden_size]."""
    num, size = len(pixels), c.patch_size
    rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
    x = ((pixels.float() / 255 - 0.5) / 0.5).bfloat16().float()
    x = x.view(num, rows, size, columns, size, 3).permute(0, 1, 3, 5, 2, 4).reshape(num, rows * columns, -1)
    x = functional.linear(x, w["vision.patch_embed.proj.weight"], w["vision.patch_embed.proj.bias"]).float()
    cos, sin = _turns(c, rows, columns)
    for layer in range(c.num_hidden_layers):
        name = f"vision.blocks.{layer}"
        x = x + _attend(w, name, c, _norm(x, w[f"{name}.norm1.weight"]), cos, sin)
        gate, up = functional.linear(_norm(x, w[f"{name}.norm2.weight"]), w[f"{name}.mlp.w1.weight"]).chunk(2, -1)
        x = x + functional.linear(functional.silu(gate) * up, w[f"{name}.mlp.w2.weight"])
    cells = _align(w, c, _norm(x, w["vision.norm.weight"]).view(num, rows, columns, -1))
    lines = torch.cat((cells, w["image_newline"].expand(num, cells.shape[1], 1, -1)), 2).flatten(1, 2)
    ends = [w[f"image_{which}"].expand(num, 1, -1) for which in ("start", "end")]
    return torch.cat((ends[0], lines, ends[1]), 1)


def _attend(
    w: Weights, name: str, c: VisionConfig, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    qkv = functional.linear(x, w[f"{name}.attn.wqkv.weight"], w[f"{name}.attn.wqkv.bias"]).float()
    q, k, v = (part.unflatten(-1, (c.num_attention_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    q, k = (_rotate(part, cos, sin) for part in (q, k))
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    out = torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2)
    return functional.linear(out, w[f"{name}.attn.wo.weight"], w[f"{name}.attn.wo.bias"])


def _align(w: Weights, c: VisionConfig, x: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns, dim] -> cells [n, down, across, hidden_size]; those past the edge see zeros."""
    ratio = c.downsample_ratio
    x = functional.pad(x, (0, 0, 0, -x.shape[2] % ratio, 0, -x.shape[1] % ratio))
    x = x.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio)).permute(0, 1, 3, 5, 2, 4).flatten(3)
    x = functional.gelu(functional.linear(x, w["aligner.w1.weight"], w["aligner.w1.bias"]))
    return functional.linear(x, w["aligner.w2.weight"], w["aligner.w2.bias"]).float()


def _turns(c: VisionConfig, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = c.hidden_size // c.num_attention_heads // 4
    freqs = 1.0 / (c.rope_theta ** (torch.arange(pairs, dtype=torch.float32) / pairs))
    down = (torch.arange(rows).view(-1, 1, 1) * freqs).expand(rows, columns, -1)
    across = (torch.arange(columns).view(1, -1, 1) * freqs).expand(rows, columns, -1)
    angles = torch.cat((down, across), -1).flatten(0, 1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight, _EPS)
