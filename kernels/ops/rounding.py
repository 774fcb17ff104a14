"""Where activations are rounded, and the few functions whose library versions are not position-independent.

`torch.sigmoid` and `silu` use other code for the last elements of an array than for the rest, and differ
there in the last bit (measured, torch 2.13 CPU); `exp`, `sqrt`, `rsqrt` and plain arithmetic do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.blas import use_one_thread
from kernels.ops.dispatch import by_device

Rounding = Callable[[torch.Tensor], torch.Tensor]
Array = npt.NDArray[np.float32]

use_one_thread()


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


def inverse_rms(x: Array, eps: float) -> Array:
    """1 / sqrt(mean of squares + eps) over the last axis, which is dropped.

    Squares are added in FP64: it costs nothing here, and no order of theirs shows in the result.
    """
    all_eps, root = _rms_constants(x.shape[-1], eps)
    wide = x.astype(np.float64)
    total = np.vecdot(wide, wide)
    total += all_eps
    np.sqrt(total, out=total)
    found: Array = np.divide(root, total, out=total).astype(np.float32)
    return found


@cache
def _rms_constants(dim: int, eps: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """As arrays without axes: an operation with a number takes half as long again."""
    return np.array(dim * eps), np.array(dim**0.5)


@by_device
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding) -> torch.Tensor:
    """RMS norm over the last axis, FP32 statistics, rounded result (spec §2.2). `weight` is fp32."""
    values = x.numpy()
    normed = values * inverse_rms(values, eps)[..., None]
    normed *= weight.numpy()
    return rounding(torch.from_numpy(normed))
