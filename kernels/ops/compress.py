"""The pooling of token pairs into compressed rows (spec §4.1)."""

from __future__ import annotations

import torch

from kernels.ops.dispatch import by_device
from kernels.ops.rounding import Rounding, rms_norm


@by_device
def pool_norm(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding
) -> torch.Tensor:
    """`first` and `second` [rows, 2 (kv, score), dim] fp32 of each pair -> normed latent [rows, dim], rounded.

    Per channel a softmax over the pair's two scores, applied to its kv.
    """
    top = torch.maximum(first[:, 1], second[:, 1])
    a, b = (first[:, 1] - top).exp_(), (second[:, 1] - top).exp_()
    total = a + b
    pooled = (a / total).mul_(first[:, 0]).add_((b / total).mul_(second[:, 0]))
    return rms_norm(rounding(pooled), weight, eps, rounding)
