"""Matrix products in fixed tiles: a row's sums run over k in one order, whatever the batch (spec §2.1, design §5)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import contiguous_bytes, e8m0_value
from kernels.ops.gpu.quant import FP8, to_codes
from kernels.ops.linear import Fp8Weight

_ROWS, _COLUMNS = 64, 32


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [rows, k] times `weight` [n, k] transposed, both fp32 -> [rows, n] fp32."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    if rows:
        linear_kernel[triton.cdiv(rows, _ROWS), triton.cdiv(n, _COLUMNS)](
            x.contiguous(),
            weight.contiguous(),
            out,
            rows,
            n,
            K=k,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def fp8_linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """`x` [rows, k] fp32, quantised on the way, times the transposed `weight` -> [rows, n] fp32."""
    (rows, k), n = x.shape, weight.codes.shape[0]
    codes, scales = to_codes(x, FP8)
    out = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    if rows:
        fp8_linear_kernel[triton.cdiv(rows, _ROWS), triton.cdiv(n, _COLUMNS)](
            codes.view(torch.float8_e4m3fn),
            scales,
            weight.codes.contiguous(),
            contiguous_bytes(weight.scale),
            out,
            rows,
            n,
            K=k,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
            num_stages=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(p_x, p_w, p_out, num_rows, n, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, used = (row < num_rows)[:, None], (column < n)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, 32):
        k = start + tl.arange(0, 32)[None, :]
        x = tl.load(p_x + row.to(tl.int64)[:, None] * K + k, mask=there & (k < K), other=0.0)
        w = tl.load(p_w + column.to(tl.int64)[:, None] * K + k, mask=used & (k < K), other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    at = p_out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, total, mask=there & (column < n)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def fp8_linear_kernel(
    p_x, p_x_scale, p_w, p_w_scale, p_out, num_rows, n,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS is 32, so that one weight scale serves the program in each block of k.

    Codes become FP16, exactly, for the product: FP8 units of some GPUs keep only some 14 bits of a sum.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, used = row < num_rows, (column < n)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, K // 32):
        k = block * 32 + tl.arange(0, 32)[None, :]
        x = tl.load(p_x + row.to(tl.int64)[:, None] * K + k, mask=there[:, None], other=0.0).to(tl.float16)
        w = tl.load(p_w + column.to(tl.int64)[:, None] * K + k, mask=used, other=0.0).to(tl.float16)
        x_scale = tl.load(p_x_scale + row.to(tl.int64) * (K // 32) + block, mask=there, other=127)
        w_scale = tl.load(p_w_scale + tl.program_id(1).to(tl.int64) * (K // 32) + block)
        part = tl.dot(x, tl.trans(w))
        total += part * (e8m0_value(x_scale) * e8m0_value(w_scale))[:, None]
    at = p_out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, total, mask=there[:, None] & (column < n)[None, :])
