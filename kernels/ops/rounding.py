"""Where activations are rounded, and the few functions whose library versions are not position-independent.

`torch.sigmoid`, `silu` and `softplus` use other code for the last elements of an array than for the rest, and differ
there in the last bit (measured, torch 2.13 CPU); `exp`, `log1p`, `sqrt`, `rsqrt` and plain arithmetic do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from kernels.ops.dispatch import by_device

Rounding = Callable[[torch.Tensor], torch.Tensor]


def keep(x: torch.Tensor) -> torch.Tensor:
    """The "fp32" compute mode: activations stay FP32."""
    return x


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The "bf16" compute mode: `x` rounded to BF16, held as FP32 (products of BF16 accumulate in FP32 anyway)."""
    return x.to(torch.bfloat16).to(torch.float32)


@cache
def scalar(value: float) -> torch.Tensor:
    """A constant operand. On small arrays an operation with a Python number takes 2.4 us, with a tensor 0.9 us."""
    return torch.tensor(value)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(scalar(1.0)).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / x.neg().exp_().add_(scalar(1.0))


def softplus(x: torch.Tensor) -> torch.Tensor:
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps) over the last axis, which is kept with length 1."""
    return (x * x).sum(-1, keepdim=True).div_(scalar(x.shape[-1])).add_(scalar(eps)).rsqrt_()


@by_device
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding) -> torch.Tensor:
    """RMS norm over the last axis, FP32 statistics, rounded result (spec §2.2). `weight` is fp32."""
    return rounding((x * inverse_rms(x, eps)).mul_(weight))
