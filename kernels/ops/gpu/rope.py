"""Rotary positions in place, and in one pass with quantisation (spec §3.1)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import power_of_two
from kernels.ops.gpu.quant import rotate_quantize
from kernels.ops.rope import Rotation

__all__ = ["rotate_", "rotate_quantize"]

_HEADS = 8  # vectors of one program


def rotate_(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the last dims of `x` `[rows, heads, dim]` in place and return it; unrounded."""
    rows, heads, dim = x.shape
    rope = rotation.cos.shape[-1]
    if x.stride(2) != 1:
        raise ValueError("the values of a vector must be neighbours")
    if x.numel():
        rotate_kernel[rows, triton.cdiv(heads, _HEADS)](
            x,
            rotation.cos,
            rotation.sin,
            x.stride(0),
            x.stride(1),
            heads,
            DIM=dim,
            ROPE=rope,
            HEADS=_HEADS,
            PAIRS=power_of_two(rope // 2),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return x


@triton.jit
def rotate_kernel(
    p_x, p_cos, p_sin, row_stride, head_stride, num_heads,
    DIM: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some heads of one row. A pair is loaded and stored by the same lanes, so working in place is safe."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    turned = pair < ROPE // 2
    mask = (head < num_heads)[:, None] & turned[None, :]
    cos = tl.load(p_cos + row * ROPE + 2 * pair, mask=turned, other=1.0)[None, :]
    sin = tl.load(p_sin + row * ROPE + 2 * pair + 1, mask=turned, other=0.0)[None, :]
    at = p_x + row * row_stride + head.to(tl.int64)[:, None] * head_stride + (DIM - ROPE) + 2 * pair[None, :]
    even = tl.load(at, mask=mask, other=0.0)
    odd = tl.load(at + 1, mask=mask, other=0.0)
    tl.store(at, even * cos - odd * sin, mask=mask)
    tl.store(at + 1, odd * cos + even * sin, mask=mask)
