"""Quantise-dequantise, alone or behind a rotation, and quantisation to codes (spec §2.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.ops import quant
from kernels.ops.gpu.numbers import (
    e2m1_code,
    e4m3_code,
    inverse_of_power,
    maybe_bf16,
    power_above,
    round_e2m1,
    round_e4m3,
    rounds,
    sign_bit,
    with_sign,
)
from kernels.ops.rope import Rotation
from kernels.ops.rounding import Rounding

FP8, FP4_E8M0, FP4_E4M3 = range(3)
_GROUP = (32, 32, 16)
_BLOCK = 512  # values of one program
_FORMATS: dict[Callable[[torch.Tensor], torch.Tensor], int] = {
    quant.fp8_qdq: FP8,
    quant.fp4_e8m0_qdq: FP4_E8M0,
    quant.fp4_e4m3_qdq: FP4_E4M3,
}


class Codes(NamedTuple):
    """`values` [rows, dim] (FP8) or [rows, dim / 2] (FP4, low nibble first), `scales` [rows, groups]; both uint8."""

    values: torch.Tensor
    scales: torch.Tensor


def fp8_qdq(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a power-of-two scale per 32 values of the last axis. fp32 -> fp32 of the same shape."""
    return _qdq(x, FP8)


def fp4_e8m0_qdq(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with a power-of-two scale per 32 values of the last axis."""
    return _qdq(x, FP4_E8M0)


def fp4_e4m3_qdq(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with an E4M3 scale per 16 values of the last axis."""
    return _qdq(x, FP4_E4M3)


def rotate_quantize(x: torch.Tensor, rotation: Rotation, quantize: Rounding, rounding: Rounding) -> torch.Tensor:
    """`x` [rows, heads, dim] fp32 rotated, rounded, quantised and dequantised in one pass; `x` is left as it was."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch(x.reshape(-1, x.shape[-1]), _FORMATS[quantize], out, None, rotation, x.shape[1], rounds(rounding))
    return out


def to_codes(x: torch.Tensor, form: int, into: Codes | None = None) -> Codes:
    """`x` [rows, dim] fp32 as codes and scales, in new tensors or in strided ones given."""
    rows, dim = x.shape
    if into is None:
        width = dim if form == FP8 else dim // 2
        into = Codes(
            torch.empty(rows, width, dtype=torch.uint8, device=x.device),
            torch.empty(rows, dim // _GROUP[form], dtype=torch.uint8, device=x.device),
        )
    _launch(x, form, None, into)
    return into


def _qdq(x: torch.Tensor, form: int) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch(x.reshape(-1, x.shape[-1]), form, out, None)
    return out


def _launch(
    x: torch.Tensor,
    form: int,
    out: torch.Tensor | None,
    codes: Codes | None,
    rotation: Rotation | None = None,
    num_heads: int = 1,
    rounded: bool = False,
) -> None:
    rows, dim = x.shape
    if dim % _GROUP[form]:
        raise ValueError(f"{dim} values are not whole groups of {_GROUP[form]}")
    x = x if x.stride(1) == 1 else x.contiguous()
    if not rows:
        return
    quantize_kernel[rows, triton.cdiv(dim, _BLOCK)](
        x,
        rotation.cos if rotation else None,
        rotation.sin if rotation else None,
        out,
        codes.values if codes else None,
        codes.scales if codes else None,
        x.stride(0),
        codes.values.stride(0) if codes else 0,
        codes.scales.stride(0) if codes else 0,
        num_heads,
        DIM=dim,
        ROPE=rotation.cos.shape[-1] if rotation else 0,
        FORM=form,
        GROUP=_GROUP[form],
        BLOCK=_BLOCK,
        BF16=rounded,
        num_warps=1,
        enable_fp_fusion=False,  # a rotation is two products and one sum, as in the reference
    )


@triton.jit
def quantize_kernel(
    p_x, p_cos, p_sin, p_out, p_codes, p_scales, x_stride, code_stride, scale_stride, num_heads,
    DIM: tl.constexpr, ROPE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """One vector, or BLOCK values of it, as pairs: even and odd members are separate arrays [groups, pairs]."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    even_at = group[:, None] * GROUP + 2 * tl.arange(0, GROUP // 2)[None, :]
    mask = even_at < DIM
    even = tl.load(p_x + row * x_stride + even_at, mask=mask, other=0.0)
    odd = tl.load(p_x + row * x_stride + even_at + 1, mask=mask, other=0.0)
    if ROPE > 0:
        angle_at = even_at - (DIM - ROPE)
        turned = mask & (angle_at >= 0)
        angle = (row // num_heads) * ROPE + angle_at
        cos = tl.load(p_cos + angle, mask=turned, other=1.0)
        sin = tl.load(p_sin + angle + 1, mask=turned, other=0.0)
        # A vector's front is not rotated: adding zero products could turn a negative zero.
        new_even = tl.where(turned, even * cos - odd * sin, even)
        odd = maybe_bf16(tl.where(turned, odd * cos + even * sin, odd), BF16)
        even = maybe_bf16(new_even, BF16)
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    if FORM == 0:
        scale = power_above(tl.maximum(amax, 1e-4) * 0.002232142857142857)
        scale_code = scale.to(tl.int32, bitcast=True) >> 23
        even_size = round_e4m3(tl.abs(even) * inverse_of_power(scale)[:, None])
        odd_size = round_e4m3(tl.abs(odd) * inverse_of_power(scale)[:, None])
    elif FORM == 1:
        scale = power_above(tl.maximum(amax, 7.052966104933725e-38) * 0.16666666666666666)
        scale_code = scale.to(tl.int32, bitcast=True) >> 23
        even_size = round_e2m1(tl.abs(even) * inverse_of_power(scale)[:, None])
        odd_size = round_e2m1(tl.abs(odd) * inverse_of_power(scale)[:, None])
    else:
        scale = round_e4m3(tl.div_rn(tl.maximum(amax, 0.01171875), 6.0))
        scale_code = e4m3_code(scale)
        even_size = round_e2m1(tl.div_rn(tl.abs(even), scale[:, None] + tl.zeros_like(even)))
        odd_size = round_e2m1(tl.div_rn(tl.abs(odd), scale[:, None] + tl.zeros_like(odd)))
    if p_out is not None:
        tl.store(p_out + row * DIM + even_at, with_sign(even_size * scale[:, None], even), mask=mask)
        tl.store(p_out + row * DIM + even_at + 1, with_sign(odd_size * scale[:, None], odd), mask=mask)
    if p_codes is not None:
        tl.store(p_scales + row * scale_stride + group, scale_code.to(tl.uint8), mask=group * GROUP < DIM)
        if FORM == 0:
            even_code = e4m3_code(even_size) | (sign_bit(even) << 7)
            odd_code = e4m3_code(odd_size) | (sign_bit(odd) << 7)
            tl.store(p_codes + row * code_stride + even_at, even_code.to(tl.uint8), mask=mask)
            tl.store(p_codes + row * code_stride + even_at + 1, odd_code.to(tl.uint8), mask=mask)
        else:
            low = e2m1_code(even_size) | (sign_bit(even) << 3)
            high = e2m1_code(odd_size) | (sign_bit(odd) << 3)
            tl.store(p_codes + row * code_stride + even_at // 2, (low | (high << 4)).to(tl.uint8), mask=mask)
