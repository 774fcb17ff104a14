"""Routed experts from packed FP4 weights, grouped on the device without a word to the host (spec §2.4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.ops.experts import Fp4Weights, Routes, add_picks
from kernels.ops.gpu.numbers import contiguous_bytes, e2m1_value, e8m0_value, maybe_bf16, power_of_two, rounds
from kernels.ops.gpu.quant import FP8, Codes, to_codes
from kernels.ops.linear import linear
from kernels.ops.rounding import Rounding, silu

_ROWS, _COLUMNS = 16, 32  # decode gives an expert a row or two: taller tiles would multiply zeros
_BLOCK = 1024


def activate(h: torch.Tensor, limit: float) -> torch.Tensor:
    """`h` [rows, 2 * inter], gate half then up half -> clamped silu(gate) * up [rows, inter], unrounded."""
    gate, up = h.chunk(2, -1)
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def run_experts(
    x: torch.Tensor,
    routes: Routes,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    rounding: Rounding,
    quantize: Rounding,
) -> torch.Tensor:
    """The same from FP32 weights, one expert after another: for checkpoints that are not quantised, which are small."""
    out = x.new_empty(*routes.experts.shape, w2.shape[1])
    for expert in range(len(w13)):
        at = (routes.experts == expert).nonzero(as_tuple=True)
        if len(at[0]):
            h = activate(rounding(linear(x[at[0]], w13[expert])), limit).mul_(routes.weights[at].unsqueeze(1))
            out[at] = rounding(linear(quantize(rounding(h)), w2[expert]))
    return add_picks(out)


def run_fp4_experts(
    x: torch.Tensor, routes: Routes, up: Fp4Weights, down: Fp4Weights, limit: float, rounding: Rounding
) -> torch.Tensor:
    """Sum of the picked experts' outputs for `x` [rows, dim] -> [rows, dim], added in pick order, in FP32."""
    (rows, dim), num_picks, inter = x.shape, routes.experts.shape[1], up.codes.shape[1] // 2
    total = torch.empty(rows, dim, dtype=torch.float32, device=x.device)
    if not rows:
        return total
    tiles = _group(routes.experts, up.codes.shape[0])
    rounded = rounds(rounding)
    hidden = torch.empty(rows * num_picks, inter, dtype=torch.float32, device=x.device)
    expert_up_kernel[len(tiles.expert), triton.cdiv(inter, _COLUMNS)](
        *_operands(to_codes(x, FP8), up),
        *tiles,
        routes.weights.contiguous(),
        hidden,
        num_picks,
        inter,
        limit,
        K=dim,
        BF16=rounded,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
        num_stages=4,
        enable_fp_fusion=False,
    )
    out = torch.empty(rows * num_picks, dim, dtype=torch.float32, device=x.device)
    expert_down_kernel[len(tiles.expert), triton.cdiv(dim, _COLUMNS)](
        *_operands(to_codes(hidden, FP8), down),
        *tiles,
        out,
        dim,
        K=inter,
        BF16=rounded,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
        num_stages=4,
        enable_fp_fusion=False,
    )
    add_picks_kernel[rows, triton.cdiv(dim, _BLOCK)](
        out, total, dim, PICKS=num_picks, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return total


def route(logits: torch.Tensor, bias: torch.Tensor, num_picks: int, factor: float) -> Routes:
    """Pick experts by score plus `bias` [experts] or [rows, experts] (equal: the lower id), weighted by score alone."""
    rows, num_experts = logits.shape
    picked = torch.empty(rows, num_picks, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, num_picks, dtype=torch.float32, device=logits.device)
    if rows:
        route_kernel[rows,](
            logits.contiguous(),
            bias.contiguous(),
            picked,
            weights,
            factor,
            BIAS_ROWS=bias.dim() == 2,
            NUM=num_experts,
            PICKS=num_picks,
            BLOCK=power_of_two(num_experts),
            PICK_BLOCK=power_of_two(num_picks),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return Routes(picked, weights)


class _Tiles(NamedTuple):
    """Per tile its `expert`, and from where (`first`) to where (`end`) its routes stand in `order`; empty ones last."""

    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    order: torch.Tensor


def _group(picked: torch.Tensor, num_experts: int) -> _Tiles:
    """As many tiles as any choice of experts can need, so that the host need not know the choice."""
    flat = picked.reshape(-1)
    order = flat.sort(stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + _ROWS - 1) // _ROWS
    last_tile, end = tiles.cumsum(0), counts.cumsum(0)
    number = torch.arange(min(num_experts, len(flat)) + len(flat) // _ROWS, device=flat.device)
    expert = torch.searchsorted(last_tile, number, right=True)
    known = expert.clamp(max=num_experts - 1)
    first = (end - counts)[known] + (number - (last_tile - tiles)[known]) * _ROWS
    return _Tiles(known, first, torch.where(expert == known, end[known], 0), order)


def _operands(x: Codes, weights: Fp4Weights) -> tuple[torch.Tensor, ...]:
    codes = x.values.view(torch.float8_e4m3fn)
    return codes, x.scales, contiguous_bytes(weights.codes), contiguous_bytes(weights.scale)


@triton.jit
def route_kernel(
    p_logits, p_bias, p_picked, p_weights, factor, BIAS_ROWS: tl.constexpr, NUM: tl.constexpr, PICKS: tl.constexpr,
    BLOCK: tl.constexpr, PICK_BLOCK: tl.constexpr,
):  # fmt: skip
    """One row; log(1 + e) is corrected for what the sum loses, as log1p does."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = expert < NUM
    if BIAS_ROWS:
        p_bias += row * NUM
    x = tl.load(p_logits + row * NUM + expert, mask=mask, other=0.0)
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    corrected = tl.log(more) * tl.div_rn(small, tl.where(more == 1.0, 1.0, more - 1.0))
    score = tl.sqrt_rn(tl.where(more == 1.0, small, corrected) + tl.maximum(x, 0.0))
    ranked = tl.where(mask, score + tl.load(p_bias + expert, mask=mask, other=0.0), -float("inf"))
    number = tl.arange(0, PICK_BLOCK)
    picked = tl.zeros([PICK_BLOCK], tl.int64)
    weights = tl.zeros([PICK_BLOCK], tl.float32)
    total = tl.zeros([PICK_BLOCK], tl.float32)
    for pick in range(0, PICKS):
        best = tl.min(tl.where(ranked == tl.max(ranked, 0), expert, BLOCK), 0)
        weight = tl.sum(tl.where(expert == best, score, 0.0), 0)
        total += weight
        picked = tl.where(number == pick, best.to(tl.int64), picked)
        weights = tl.where(number == pick, weight, weights)
        ranked = tl.where(expert == best, -float("inf"), ranked)
    if PICKS > 1:
        weights = tl.div_rn(weights, total + 1e-20)
    at = row * PICKS + number
    tl.store(p_picked + at, picked, mask=number < PICKS)
    tl.store(p_weights + at, weights * factor, mask=number < PICKS)


@triton.jit
def fp4_product(
    p_x, p_x_scale, x_row, there, p_w, p_w_scale, w_row, used,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows `x_row` of the activations times rows `w_row` of the weights: [ROWS, COLUMNS], blocks of 32 k in order.

    Even and odd k are two products, because they are the low and the high halves of the bytes.
    """
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, K // 32):
        pair = block * 16 + tl.arange(0, 16)[None, :]
        byte = tl.load(p_w + w_row[:, None] * (K // 2) + pair, mask=used[:, None], other=0).to(tl.int32)
        at = p_x + x_row[:, None] * K + 2 * pair
        even = tl.load(at, mask=there[:, None], other=0.0).to(tl.float16)
        odd = tl.load(at + 1, mask=there[:, None], other=0.0).to(tl.float16)
        part = tl.dot(even, tl.trans(e2m1_value(byte & 15).to(tl.float16)))
        part = tl.dot(odd, tl.trans(e2m1_value(byte >> 4).to(tl.float16)), part)
        x_scale = tl.load(p_x_scale + x_row * (K // 32) + block, mask=there, other=127)
        w_scale = tl.load(p_w_scale + w_row * (K // 32) + block, mask=used, other=127)
        total += part * (e8m0_value(x_scale)[:, None] * e8m0_value(w_scale)[None, :])
    return total


@triton.jit
def expert_up_kernel(
    p_x, p_x_scale, p_w, p_w_scale, p_expert, p_first, p_end, p_order, p_weights, p_out, num_picks, inter, limit,
    K: tl.constexpr, BF16: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Both halves of the first matrix, the clamped activation and the route's weight, for one tile of one expert."""
    tile = tl.program_id(0)
    number = tl.load(p_first + tile) + tl.arange(0, ROWS)
    there = number < tl.load(p_end + tile)
    if tl.max(there.to(tl.int32), 0) > 0:
        route = tl.load(p_order + number, mask=there, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        used = column < inter
        w_row = tl.load(p_expert + tile).to(tl.int64) * (2 * inter) + column
        row = route // num_picks
        gate = fp4_product(p_x, p_x_scale, row, there, p_w, p_w_scale, w_row, used, K, ROWS, COLUMNS)
        up = fp4_product(p_x, p_x_scale, row, there, p_w, p_w_scale, w_row + inter, used, K, ROWS, COLUMNS)
        gate = tl.minimum(maybe_bf16(gate, BF16), limit)
        up = tl.minimum(tl.maximum(maybe_bf16(up, BF16), -limit), limit)
        weight = tl.load(p_weights + route, mask=there, other=0.0)
        hidden = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up * weight[:, None]
        at = p_out + route[:, None] * inter + column[None, :]
        tl.store(at, maybe_bf16(hidden, BF16), mask=there[:, None] & used[None, :])


@triton.jit
def expert_down_kernel(
    p_x, p_x_scale, p_w, p_w_scale, p_expert, p_first, p_end, p_order, p_out, n,
    K: tl.constexpr, BF16: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    number = tl.load(p_first + tile) + tl.arange(0, ROWS)
    there = number < tl.load(p_end + tile)
    if tl.max(there.to(tl.int32), 0) > 0:
        route = tl.load(p_order + number, mask=there, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        w_row = tl.load(p_expert + tile).to(tl.int64) * n + column
        total = fp4_product(p_x, p_x_scale, route, there, p_w, p_w_scale, w_row, column < n, K, ROWS, COLUMNS)
        at = p_out + route[:, None] * n + column[None, :]
        tl.store(at, maybe_bf16(total, BF16), mask=there[:, None] & (column < n)[None, :])


@triton.jit
def add_picks_kernel(p_x, p_out, dim, PICKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(p_x + row * PICKS * dim + column, mask=column < dim, other=0.0)
    for pick in range(1, PICKS):
        total += tl.load(p_x + (row * PICKS + pick) * dim + column, mask=column < dim, other=0.0)
    tl.store(p_out + row * dim + column, total, mask=column < dim)
