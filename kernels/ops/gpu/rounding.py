"""The RMS norm alone (spec §2.2)."""

from __future__ import annotations

import torch

from kernels.ops.gpu.mix import collapsed
from kernels.ops.rounding import Rounding


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding) -> torch.Tensor:
    """RMS norm over the last axis, FP32 statistics, rounded result. `weight` is fp32."""
    return collapsed(x.reshape(-1, 1, x.shape[-1]), None, weight, eps, rounding).view(x.shape)
