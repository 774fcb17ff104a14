"""Single-Pass mHC: coefficients, collapse with the norm that follows it, expansion (spec §2.3).

The products over all streams are cut along k into a fixed number of parts, added in order: a decode step has few rows
and 20,480 values in each, so one program per row tile would take most of the device's time doing nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import maybe_bf16, power_of_two, rounds
from kernels.ops.mix import Mix, MixWeights
from kernels.ops.rounding import Rounding

_ROWS, _BLOCK_K, _PARTS = 16, 64, 32
_BLOCK = 1024


def mix(streams: torch.Tensor, weights: MixWeights, eps: float, norm_eps: float, iterations: int) -> Mix:
    """Coefficients of one sub-layer from the residual `streams` [rows, C, dim] fp32."""
    rows, num, dim = streams.shape
    columns, k = weights.fn.shape
    out = Mix(*(torch.empty(rows, *shape, device=streams.device) for shape in ((num,), (num,), (num, num))))
    if not rows:
        return out
    parts = torch.empty(_PARTS, rows, columns + 1, device=streams.device)
    mix_products_kernel[triton.cdiv(rows, _ROWS), _PARTS](
        streams.contiguous(),
        weights.fn,
        parts,
        rows,
        K=k,
        COLUMNS=columns,
        ROWS=_ROWS,
        BLOCK_K=_BLOCK_K,
        BLOCKS=triton.cdiv(k, _BLOCK_K * _PARTS),
        WIDTH=power_of_two(columns),
        num_warps=4,
        enable_fp_fusion=False,
    )
    mix_coefficients_kernel[rows,](
        parts,
        weights.scale,
        weights.base,
        *out,
        rows,
        eps,
        norm_eps,
        K=k,
        NUM=num,
        SIDE=1 << (num - 1).bit_length(),
        ITERATIONS=iterations,
        PARTS=_PARTS,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def collapse(streams: torch.Tensor, pre: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Weighted sum of the streams [rows, C, dim] -> [rows, dim], rounded."""
    return collapsed(streams, pre, None, 0.0, rounding)


def collapse_norm(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding
) -> torch.Tensor:
    """`collapse`, then the RMS norm with `weight` [dim]: [rows, dim], rounded after both."""
    return collapsed(streams, pre, weight, eps, rounding)


def collapsed(
    streams: torch.Tensor, pre: torch.Tensor | None, weight: torch.Tensor | None, eps: float, rounding: Rounding
) -> torch.Tensor:
    """Streams [rows, C, dim] added with weights `pre` (none: C is 1), then normed (or not): [rows, dim]."""
    rows, num, dim = streams.shape
    out = torch.empty(rows, dim, device=streams.device)
    if rows:
        collapse_norm_kernel[rows,](
            streams.contiguous(),
            None if pre is None else pre.contiguous(),
            weight,
            out,
            eps,
            DIM=dim,
            NUM=num,
            BF16=rounds(rounding),
            BLOCK=power_of_two(dim),
            num_warps=max(1, min(8, math.ceil(dim / 512))),
            enable_fp_fusion=False,
        )
    return out


def mean_streams_(out: torch.Tensor, streams: Sequence[torch.Tensor]) -> None:
    """Write the mean of the streams [rows, C, dim] of some layers, added in order, into `out` [rows, layers, dim];
    unrounded."""
    for number, each in enumerate(streams):
        out[:, number] = each[:, 0]
        for stream in range(1, each.shape[1]):
            out[:, number] += each[:, stream]
    out /= streams[0].shape[1]


def expand(y: torch.Tensor, streams: torch.Tensor, mixed: Mix, rounding: Rounding) -> torch.Tensor:
    """A sub-layer's output `y` [rows, dim] added to the re-mixed streams [rows, C, dim], rounded."""
    rows, num, dim = streams.shape
    out = torch.empty(rows, num, dim, device=streams.device)
    if rows:
        expand_kernel[rows, triton.cdiv(dim, _BLOCK)](
            y.contiguous(),
            streams.contiguous(),
            mixed.post.contiguous(),
            mixed.comb.contiguous(),
            out,
            dim,
            NUM=num,
            BF16=rounds(rounding),
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def mix_products_kernel(
    p_x, p_fn, p_parts, num_rows,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One part of k: products with every row of fn, and the sum of squares as one more column."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < num_rows)[:, None]
    part = tl.program_id(1)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for block in range(0, BLOCKS):
        k = (part * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(p_x + row.to(tl.int64)[:, None] * K + k, mask=there & (k < K), other=0.0)
        fn = tl.load(p_fn + column.to(tl.int64)[:, None] * K + k, mask=(column < COLUMNS)[:, None] & (k < K), other=0.0)
        total = tl.dot(x, tl.trans(fn), total, input_precision="ieee")
        squares += tl.sum(x * x, 1)
    at = p_parts + (part.to(tl.int64) * num_rows + row) * (COLUMNS + 1)
    tl.store(at[:, None] + column[None, :], total, mask=there & (column < COLUMNS)[None, :])
    tl.store(at + COLUMNS, squares, mask=row < num_rows)


@triton.jit
def summed(p_parts, at, mask, stride, PARTS: tl.constexpr):
    total = tl.load(p_parts + at, mask=mask, other=0.0)
    for part in range(1, PARTS):
        total += tl.load(p_parts + part * stride + at, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def mix_coefficients_kernel(
    p_parts, p_scale, p_base, p_pre, p_post, p_comb, num_rows, eps, norm_eps,
    K: tl.constexpr, NUM: tl.constexpr, SIDE: tl.constexpr, ITERATIONS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row: parts added in order, gates, and the alternating normalisation of its square matrix."""
    row = tl.program_id(0).to(tl.int64)
    columns = (2 + NUM) * NUM
    stride = num_rows.to(tl.int64) * (columns + 1)
    base = row * (columns + 1)
    squares = summed(p_parts, base + columns + tl.arange(0, 1), tl.full([1], 1, tl.int1), stride, PARTS)
    inverse = tl.div_rn(tl.full([1], 1.0, tl.float32), tl.sqrt_rn(squares / K + norm_eps))

    stream = tl.arange(0, SIDE)
    one = stream < NUM
    pre = summed(p_parts, base + stream, one, stride, PARTS) * inverse
    pre = pre * tl.load(p_scale + stream, mask=one, other=0.0) + tl.load(p_base + stream, mask=one, other=0.0)
    post = summed(p_parts, base + NUM + stream, one, stride, PARTS) * inverse
    post = post * tl.load(p_scale + NUM + stream, mask=one, other=0.0)
    post += tl.load(p_base + NUM + stream, mask=one, other=0.0)
    tl.store(p_pre + row * NUM + stream, 1.0 / (1.0 + tl.exp(-pre)) + eps, mask=one)
    tl.store(p_post + row * NUM + stream, 2.0 / (1.0 + tl.exp(-post)), mask=one)

    at = stream[:, None] * NUM + stream[None, :]
    both = one[:, None] & one[None, :]
    comb = summed(p_parts, base + 2 * NUM + at, both, stride, PARTS) * inverse[None, :]
    comb = comb * tl.load(p_scale + 2 * NUM + at, mask=both, other=0.0)
    comb += tl.load(p_base + 2 * NUM + at, mask=both, other=0.0)
    comb = tl.where(both, comb, -float("inf"))
    top = tl.where(one, tl.max(comb, 1), 0.0)
    comb = tl.exp(comb - top[:, None])
    comb = tl.div_rn(comb, tl.where(one, tl.sum(comb, 1), 1.0)[:, None] + tl.zeros_like(comb))
    comb = tl.where(both, comb + eps, 0.0)
    comb = tl.div_rn(comb, (tl.sum(comb, 0) + eps)[None, :] + tl.zeros_like(comb))
    for _ in range(1, ITERATIONS):
        comb = tl.div_rn(comb, (tl.sum(comb, 1) + eps)[:, None] + tl.zeros_like(comb))
        comb = tl.div_rn(comb, (tl.sum(comb, 0) + eps)[None, :] + tl.zeros_like(comb))
    tl.store(p_comb + row * NUM * NUM + at, comb, mask=both)


@triton.jit
def collapse_norm_kernel(
    p_x, p_pre, p_weight, p_out, eps,
    DIM: tl.constexpr, NUM: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, BLOCK)
    mask = value < DIM
    x = tl.load(p_x + row * NUM * DIM + value, mask=mask, other=0.0)
    if p_pre is not None:
        x *= tl.load(p_pre + row * NUM)
        for stream in range(1, NUM):
            other = tl.load(p_x + (row * NUM + stream) * DIM + value, mask=mask, other=0.0)
            x += other * tl.load(p_pre + row * NUM + stream)
        x = maybe_bf16(x, BF16)
    if p_weight is not None:
        mean = tl.sum(x * x, 0) / DIM
        weight = tl.load(p_weight + value, mask=mask, other=0.0)
        x = maybe_bf16(tl.div_rn(x, tl.sqrt_rn(mean + eps) + tl.zeros_like(x)) * weight, BF16)
    tl.store(p_out + row * DIM + value, x, mask=mask)


@triton.jit
def expand_kernel(
    p_y, p_x, p_post, p_comb, p_out, dim, NUM: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = value < dim
    y = tl.load(p_y + row * dim + value, mask=mask, other=0.0)
    for target in range(0, NUM):
        moved = tl.zeros([BLOCK], tl.float32)
        for source in range(0, NUM):
            x = tl.load(p_x + (row * NUM + source) * dim + value, mask=mask, other=0.0)
            moved += x * tl.load(p_comb + row * NUM * NUM + source * NUM + target)
        moved += y * tl.load(p_post + row * NUM + target)
        tl.store(p_out + (row * NUM + target) * dim + value, maybe_bf16(moved, BF16), mask=mask)
