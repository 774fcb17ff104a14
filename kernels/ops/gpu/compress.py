"""Pooling of token pairs and the norm behind it, in one pass (spec §4.1)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import maybe_bf16, power_of_two, rounds
from kernels.ops.rounding import Rounding


def pool_norm(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding
) -> torch.Tensor:
    """`first` and `second` [rows, 2 (kv, score), dim] fp32 of each pair -> normed latent [rows, dim], rounded."""
    rows, _, dim = first.shape
    out = torch.empty(rows, dim, dtype=torch.float32, device=first.device)
    if rows:
        pool_norm_kernel[rows,](
            first.contiguous(),
            second.contiguous(),
            weight,
            out,
            eps,
            DIM=dim,
            BF16=rounds(rounding),
            BLOCK=power_of_two(dim),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def pool_norm_kernel(
    p_first, p_second, p_weight, p_out, eps, DIM: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, BLOCK)
    mask = value < DIM
    at = row * 2 * DIM + value
    first = tl.load(p_first + at, mask=mask, other=0.0)
    second = tl.load(p_second + at, mask=mask, other=0.0)
    a = tl.load(p_first + at + DIM, mask=mask, other=0.0)
    b = tl.load(p_second + at + DIM, mask=mask, other=0.0)
    top = tl.maximum(a, b)
    a, b = tl.exp(a - top), tl.exp(b - top)
    x = maybe_bf16(tl.div_rn(a, a + b) * first + tl.div_rn(b, a + b) * second, BF16)
    mean = tl.sum(tl.where(mask, x * x, 0.0), 0) / DIM
    weight = tl.load(p_weight + value, mask=mask, other=0.0)
    x = tl.div_rn(x, tl.sqrt_rn(mean + eps) + tl.zeros_like(x)) * weight
    tl.store(p_out + row * DIM + value, maybe_bf16(x, BF16), mask=mask)
