"""Quantise-dequantise (QDQ) of activations and cache rows, and dequantisation of stored weights (spec §2.1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kernels.ops.dispatch import by_device

_FP8_MAX = 448.0
_FP4_MAX = 6.0
# Operands of numpy calls are arrays without axes: numbers take half as long again.
_EXPONENT = np.array(0x7F800000, dtype=np.int32)
_BELOW_ONE = np.array(0x007FFFFF, dtype=np.int32)  # takes bits over their power of two, or leaves them on it
_LEAST_FP8 = np.array(1e-4, dtype=np.float32)
_LEAST_FP4 = np.array(_FP4_MAX * 2.0**-126, dtype=np.float32)
# Reciprocals in FP32, as published.
_INV_448 = np.array(1 / 448, dtype=np.float32)
_INV_6 = np.array(1 / 6, dtype=np.float32)


class _Format(NamedTuple):
    """`shift` turns the bits of 2^e into those of 2^23 times the spacing there; `floor` is 31/32 of the least one."""

    shift: np.ndarray
    floor: np.ndarray

    @classmethod
    def of(cls, mantissa_bits: int, least_exponent: int) -> _Format:
        shift = 23 - mantissa_bits
        floor = 2.0 ** (shift + least_exponent) * 31 / 32
        return cls(np.array(shift << 23, dtype=np.int32), np.array(floor, dtype=np.float32))


_E4M3 = _Format.of(3, -6)
_E2M1_VALUES = _Format.of(1, 0)
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# Both values of a byte, the low half first, as one complex number: a table read half as often.
E2M1_PAIRS = torch.view_as_complex(torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), 1))


@by_device
def fp8_qdq(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a power-of-two scale per 32 values of the last axis. fp32 -> fp32 of the same shape.

    What becomes zero keeps its sign. A group with an infinity or a NaN becomes NaN.
    """
    groups = x.reshape(-1, 32)
    size = groups.abs()
    scale = _power_of_two(size, _LEAST_FP8, _INV_448)
    # No clamp: the scale leaves nothing above the maximum that does not round to it.
    _round(size.div_(scale), _E4M3)
    return size.mul_(scale).copysign_(groups).view(x.shape)


@by_device
def fp4_e8m0_qdq(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with a power-of-two scale per 32 values of the last axis: index queries and keys."""
    groups = x.reshape(-1, 32)
    size = groups.abs()
    scale = _power_of_two(size, _LEAST_FP4, _INV_6)
    _round(size.div_(scale), _E2M1_VALUES)
    return size.mul_(scale).copysign_(groups).view(x.shape)


@by_device
def fp4_e4m3_qdq(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with an E4M3 scale per 16 values of the last axis: the main compressed KV."""
    groups = x.reshape(-1, 16)
    size = groups.abs()
    scale = size.amax(1, keepdim=True).clamp_(min=_FP4_MAX * 2.0**-9).div_(_FP4_MAX).clamp_(max=_FP8_MAX)
    _round(scale, _E4M3)
    _round(size.div_(scale).clamp_(max=_FP4_MAX), _E2M1_VALUES)
    return size.mul_(scale).copysign_(groups).view(x.shape)


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
    pairs = E2M1_PAIRS.index_select(0, packed.view(torch.uint8).reshape(-1).to(torch.int32))
    values = torch.view_as_real(pairs).view(*scale.shape, 32)
    return values.mul_(scale.to(torch.float32).unsqueeze(-1)).flatten(1)


def _power_of_two(size: torch.Tensor, least: np.ndarray, reciprocal: np.ndarray) -> torch.Tensor:
    """Scale of each group of `size` [groups, n] (not negative): the smallest power of two that brings it in range."""
    scale = size.amax(1, keepdim=True)
    values = scale.numpy()
    np.maximum(values, least, out=values)
    values *= reciprocal
    bits = values.view(np.int32)
    bits += _BELOW_ONE
    bits &= _EXPONENT
    return scale


def _round(size: torch.Tensor, to: _Format) -> None:
    """Round values from zero on to the nearest of a format, ties to the even one, in place.

    A sum with 2^23 spacings has no bits for less than one. Below the least normal value the spacing stays what it is
    there, and so must the sum's exponent: `floor` sees to that, without changing it or the parity anywhere else.
    """
    values = size.numpy()
    bits = values.view(np.int32) & _EXPONENT
    bits += to.shift
    magic = bits.view(np.float32)
    magic += to.floor
    values += magic
    values -= magic
