"""Rotary positions on the last dims of a vector, adjacent pairs (spec §3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.config import RopeScaling
from kernels.ops.dispatch import by_device
from kernels.ops.rounding import Rounding


def frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """`[dim / 2]` fp32 radians per position; `scaling` applies YaRN's interpolation, without its mscale."""
    base = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return base

    def turn_dim(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turn_dim(scaling.beta_fast)), 0)
    high = min(math.ceil(turn_dim(scaling.beta_slow)), dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp_(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


@dataclass(frozen=True)
class Rotation:
    """Cosines and signed sines `[rows, 1, dim]` of some positions, each pair's value repeated for both members."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, freqs: torch.Tensor) -> Rotation:
        """For `positions` `[rows]` int64; angles are FP32 position times FP32 frequency, as published."""
        angles = positions.to(torch.float32)[:, None] * freqs
        cos, sin = angles.cos(), angles.sin()
        pairs = (torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2))
        return cls(pairs[0][:, None], pairs[1][:, None])

    def of(self, rows: slice | torch.Tensor) -> Rotation:
        """That of some rows."""
        whole = isinstance(rows, slice) and rows.start in (None, 0) and rows.stop == len(self.cos)
        return self if whole else Rotation(self.cos[rows], self.sin[rows])

    @cached_property
    def inverse(self) -> Rotation:
        return Rotation(self.cos, -self.sin)


@by_device
def rotate_(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the last dims of `x` `[rows, heads, dim]` in place and return it; unrounded.

    Two products and one sum per value, never fused, so that every position in an array gives the same bits.
    """
    tail = x[..., -rotation.cos.shape[-1] :]
    swapped = tail.reshape(*tail.shape[:-1], -1, 2).flip(-1).flatten(-2).mul_(rotation.sin)
    tail.mul_(rotation.cos).add_(swapped)
    return x


@by_device
def rotate_quantize(x: torch.Tensor, rotation: Rotation, quantize: Rounding, rounding: Rounding) -> torch.Tensor:
    """`x` `[rows, heads, dim]` fp32, which may be overwritten, rotated, rounded and put through `quantize`.

    `quantize` is one of the quantise-dequantise functions of `ops/quant.py`: what a cache row or index query becomes.
    """
    return quantize(rounding(rotate_(x, rotation)))
