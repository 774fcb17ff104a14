"""Sums in FP64, to tell a wrong formula from a value that rounds the other way.

A value within 1e-7 of a rounding boundary of FP8 or FP4 falls on one side or the other by the order of summation, and
then moves logits by 1e-4 to 1. A wrong formula stays wrong when every sum is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kernels.ops.attention import KeySet
from kernels.ops.rounding import Rounding


@contextmanager
def exact_sums() -> Iterator[None]:
    """Inside, matrix products and attention add in FP64 and round once."""
    new: dict[str, Callable[..., Any]] = {
        "linear": _linear,
        "each_linear": _each_linear,
        "multiply": _multiply,
        "attend": _attend,
    }
    modules = [module for name, module in sys.modules.items() if name.startswith("kernels")]
    before = [(module, name, vars(module)[name]) for module in modules for name in new if name in vars(module)]
    try:
        for module, name, _ in before:
            setattr(module, name, new[name])
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().T).float()


def _each_linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.double(), weights.double().transpose(1, 2)).float()


def _multiply(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    out[:] = x.astype(np.float64) @ weight.astype(np.float64).T


def _attend(
    q: torch.Tensor, key_sets: Sequence[KeySet], sink: torch.Tensor, scale: float, rounding: Rounding
) -> torch.Tensor:
    keys = torch.cat([one.keys.double() for one in key_sets], 1)
    scores = torch.einsum("rhd,rkd->rhk", q.double(), keys) * scale
    scores += torch.cat([one.bias for one in key_sets], 1).double().unsqueeze(1)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink.double()[:, None] - top).exp()
    return rounding((torch.einsum("rhk,rkd->rhd", weights, keys) / total).float())
