"""Number formats inside kernels, from their bits: the same results compiled and interpreted, without a cast to trust.

Triton's interpreter truncates casts to BF16 and misrounds casts to E4M3 (measured, triton 3.9), and a GPU's division is
approximate unless asked; so values are rounded here by integer operations and by adding a large number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.ops.rounding import Rounding, keep, to_bf16


def rounds(rounding: Rounding) -> bool:
    """Whether `rounding` is `to_bf16`; kernels know that and `keep`. Raises ValueError for another function."""
    if rounding is not to_bf16 and rounding is not keep:
        raise ValueError("a kernel rounds to BF16 or not at all")
    return rounding is to_bf16


def operand(rounded: bool) -> Any:
    """The type in which a product takes inputs that are exact in BF16 (`rounded`), or any FP32 ones.

    The interpreter holds BF16 as integers and cannot multiply it; FP32 gives it the same products.
    """
    return tl.bfloat16 if rounded and not triton.knobs.runtime.interpret else tl.float32


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size` and at least 16, the smallest side of a product."""
    return max(16, 1 << (size - 1).bit_length())


def contiguous_bytes(x: torch.Tensor) -> torch.Tensor:
    """A tensor of one-byte numbers as uint8: kernels take them apart themselves."""
    return x.contiguous().view(torch.uint8)


@triton.jit
def to_bf16_bits(x):
    """FP32 `x` rounded to BF16, nearest even, held as FP32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def maybe_bf16(x, BF16: tl.constexpr):
    if BF16:
        return to_bf16_bits(x)
    return x


@triton.jit
def power_above(x):
    """The smallest power of two that is at least `x`, positive and normal."""
    return ((x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def power_below(x):
    """The greatest power of two that is at most `x`, positive and normal."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of_power(x):
    """1 / `x` for a power of two from 2**-126 to 2**126, exactly."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def nearest_even(x):
    """`x` of magnitude below 2**22 rounded to whole numbers, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def with_sign(magnitude, x):
    """`magnitude` with the sign bit of `x`, so that negative zeros stay."""
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(magnitude):
    """A magnitude rounded to E4M3, saturating; steps of 2**-9 below 2**-6, three bits of mantissa above."""
    magnitude = tl.minimum(magnitude, 448.0)
    step = power_below(tl.maximum(magnitude, 0.015625)) * 0.125
    return nearest_even(magnitude * inverse_of_power(step)) * step


@triton.jit
def e4m3_code(magnitude):
    """The seven low bits of a magnitude that E4M3 holds exactly."""
    normal = (magnitude.to(tl.int32, bitcast=True) >> 20) - 960
    return tl.where(magnitude < 0.015625, (magnitude * 512.0).to(tl.int32), normal)


@triton.jit
def e4m3_value(code):
    """The FP32 value of a code (its NaN is not looked for)."""
    code = code.to(tl.int32)
    low = code & 127
    normal = ((low + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal)
    return tl.where(code > 127, -value, value)


@triton.jit
def round_e2m1(magnitude):
    """A magnitude rounded to 0, .5, 1, 1.5, 2, 3, 4 or 6, ties to the even code, saturating."""
    magnitude = tl.minimum(magnitude, 6.0)
    step = power_below(tl.maximum(magnitude, 1.0)) * 0.5
    return nearest_even(magnitude * inverse_of_power(step)) * step


@triton.jit
def e2m1_code(magnitude):
    """The three low bits of a magnitude that E2M1 holds exactly."""
    normal = (magnitude.to(tl.int32, bitcast=True) >> 22) - 252
    return tl.where(magnitude < 1.0, (magnitude * 2.0).to(tl.int32), normal)


@triton.jit
def e2m1_value(code):
    """The FP32 value of the four low bits of `code`."""
    code = code.to(tl.int32)
    low = code & 7
    normal = ((low + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(low < 2, low.to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def e8m0_value(code):
    """2**(code - 127) as FP32."""
    code = code.to(tl.int32)
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def sign_bit(x):
    """1 for a negative `x`, negative zero included."""
    return (x.to(tl.int32, bitcast=True) >> 31) & 1
