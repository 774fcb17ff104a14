"""Quantise-dequantise (QDQ) of activations and cache rows, and dequantisation of stored weights (spec §2.1)."""

from __future__ import annotations

import torch

from kernels.ops.dispatch import by_device

_FP8_MAX = 448.0
_FP4_MAX = 6.0
# Reciprocals in FP32, as published: dividing instead gives other scales for a few inputs.
_INV_448 = torch.tensor(1 / 448)
_INV_6 = torch.tensor(1 / 6)
_SIX = torch.tensor(_FP4_MAX)
_HALF = torch.tensor(0.5)
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# Both values of a byte, the low half first, as one complex number: a table read half as often.
_E2M1_PAIRS = torch.view_as_complex(torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), 1))


@by_device
def fp8_qdq(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a power-of-two scale per 32 values of the last axis. fp32 -> fp32 of the same shape."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-4)
    scale = _power_of_two_above(amax.mul_(_INV_448))
    codes = (groups / scale).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return codes.to(torch.float32).mul_(scale).flatten(-2)


@by_device
def fp4_e8m0_qdq(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with a power-of-two scale per 32 values of the last axis: index queries and keys."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=_FP4_MAX * 2.0**-126)
    scale = _power_of_two_above(amax.mul_(_INV_6))
    return _round_e2m1(groups / scale).mul_(scale).flatten(-2)


@by_device
def fp4_e4m3_qdq(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with an E4M3 scale per 16 values of the last axis: the main compressed KV."""
    groups = x.reshape(*x.shape[:-1], -1, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=_FP4_MAX * 2.0**-9)
    scale = (amax / _SIX).clamp_(max=_FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return _round_e2m1(groups / scale).mul_(scale).flatten(-2)


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of an E4M3 table `[rows, dim]` with E8M0 scales `[rows, dim / 32]` -> fp32; every value fits BF16."""
    groups = codes.to(torch.float32).view(*scale.shape, 32)
    return (groups * scale.to(torch.float32).unsqueeze(-1)).flatten(-2)


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """An E4M3 matrix `[n, k]` with an E8M0 scale per 32 x 32 block `[ceil(n / 32), k / 32]` -> fp32, exact."""
    rows = scale.to(torch.float32).repeat_interleave(32, 0)[: len(codes)]
    return codes.to(torch.float32).view(*rows.shape, 32).mul_(rows.unsqueeze(-1)).flatten(1)


def dequantize_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A packed E2M1 matrix `[n, k / 2]`, low nibble first, E8M0 scale per row and 32 columns `[n, k / 32]` -> fp32."""
    pairs = _E2M1_PAIRS.index_select(0, packed.view(torch.uint8).reshape(-1).to(torch.int32))
    values = torch.view_as_real(pairs).view(*scale.shape, 32)
    return values.mul_(scale.to(torch.float32).unsqueeze(-1)).flatten(1)


def _power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least `x` (positive, normal), from the bits."""
    return x.view(torch.int32).add(0x007FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code, saturating; overwrites `x`."""
    x.clamp_(-_FP4_MAX, _FP4_MAX)
    # The spacing is 0.5 below 2, 1 below 4, 2 above; ties to even codes are ties to even multiples of the spacing.
    step = x.abs().clamp_(min=1.0).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).mul_(_HALF)
    return x.div_(step).round_().mul_(step)
