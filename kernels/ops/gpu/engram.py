"""Engram's table rows and its gated addition (spec §7.4); the hashes are integers, which torch computes anywhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import contiguous_bytes, e4m3_value, e8m0_value, maybe_bf16, power_of_two, rounds
from kernels.ops.rounding import Rounding

_ROWS = 4  # table rows of one program


def look_up(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Table rows, E4M3 `codes` [tokens, n, dim] with E8M0 `scale` [tokens, n, dim / 32], as values: [tokens, n dim]."""
    tokens, num, dim = codes.shape
    out = torch.empty(tokens, num * dim, dtype=torch.float32, device=codes.device)
    if tokens:
        look_up_kernel[triton.cdiv(tokens * num, _ROWS),](
            contiguous_bytes(codes),
            contiguous_bytes(scale),
            out,
            tokens * num,
            DIM=dim,
            ROWS=_ROWS,
            BLOCK=power_of_two(dim),
            num_warps=2,
            enable_fp_fusion=False,
        )
    return out


def add_gated(
    streams: torch.Tensor, projected: torch.Tensor, qk_weight: torch.Tensor, alive: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """`streams` [rows, C, dim] plus the gated value; rounded. Arguments as in the reference."""
    rows, num, dim = streams.shape
    out = torch.empty(rows, num, dim, dtype=torch.float32, device=streams.device)
    if rows:
        add_gated_kernel[rows, num](
            streams.contiguous(),
            projected.contiguous(),
            qk_weight,
            alive,
            out,
            dim**-0.5,
            DIM=dim,
            NUM=num,
            BF16=rounds(rounding),
            BLOCK=power_of_two(dim),
            num_warps=8 if dim > 1024 else 4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def look_up_kernel(p_codes, p_scale, p_out, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    value = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (value < DIM)
    code = tl.load(p_codes + row * DIM + value, mask=mask, other=0)
    scale = tl.load(p_scale + row * (DIM // 32) + value // 32, mask=mask, other=127)
    tl.store(p_out + row * DIM + value, e4m3_value(code) * e8m0_value(scale), mask=mask)


@triton.jit
def add_gated_kernel(
    p_x, p_projected, p_weight, p_alive, p_out, factor,
    DIM: tl.constexpr, NUM: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and stream."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    value = tl.arange(0, BLOCK)
    mask = value < DIM
    at = (row * NUM + stream) * DIM + value
    x = tl.load(p_x + at, mask=mask, other=0.0)
    key = tl.load(p_projected + (row * (NUM + 1) + stream) * DIM + value, mask=mask, other=0.0)
    weight = tl.load(p_weight + stream * DIM + value, mask=mask, other=0.0)
    size = tl.sqrt_rn(tl.sum(x * x, 0) / DIM + 1e-20) * tl.sqrt_rn(tl.sum(key * key, 0) / DIM + 1e-20)
    dot = tl.sum(x * weight * key, 0) / size * factor
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
    signed = tl.where(dot > 0, root, tl.where(dot < 0, -root, 0.0))
    gate = tl.load(p_alive + row) / (1.0 + tl.exp(-signed))
    memory = tl.load(p_projected + (row * (NUM + 1) + NUM) * DIM + value, mask=mask, other=0.0)
    tl.store(p_out + at, maybe_bf16(x + gate * memory, BF16), mask=mask)
