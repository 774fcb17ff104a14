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
from kernels.ops.mix import Mix, MixWeights
from kernels.ops.rounding import Rounding

FLIPPED = 1e-3
"""More than the order of summation explains: either wrong, or some value rounds the other way, here or in the data."""


def either_sums(run: Callable[[], tuple[float, int]]) -> tuple[float, int, str]:
    """What `run` finds, an error and a number of wrong tokens, by the sums that come closest; and all in words.

    Tried in turn: those of this processor, exact products, everything exact.
    """
    found = [run()]
    for everywhere in (False, True):
        if found[-1][0] > FLIPPED or found[-1][1]:
            with exact_sums(everywhere=everywhere):
                found.append(run())
    words = "; with exact sums ".join(f"max error {error:.1e}, {wrong} wrong tokens" for error, wrong in found)
    return *min(found), words


@contextmanager
def exact_sums(*, everywhere: bool = False) -> Iterator[None]:
    """Inside, products and attention compute in FP64 and round once; everywhere: norms and mixes too."""
    new: dict[str, Callable[..., Any]] = {
        "linear": _linear,
        "each_linear": _each_linear,
        "multiply": _multiply,
        "attend": _attend,
    }
    if everywhere:
        new |= {"rms_norm": _rms_norm, "mix": _mix, "collapse": _collapse, "expand": _expand}
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
    keys = torch.cat([one.keys.reshape(len(q), -1, q.shape[-1]).double() for one in key_sets], 1)
    scores = torch.einsum("rhd,rkd->rhk", q.double(), keys) * scale
    scores += torch.cat([one.bias for one in key_sets], 1).double().unsqueeze(1)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink.double()[:, None] - top).exp()
    return rounding((torch.einsum("rhk,rkd->rhd", weights, keys) / total).float())


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding) -> torch.Tensor:
    wide = x.double()
    return rounding((wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).float())


def _mix(streams: torch.Tensor, weights: MixWeights, eps: float, norm_eps: float, iterations: int) -> Mix:
    flat, num = streams.flatten(1).double(), streams.shape[1]
    mixes = flat @ weights.fn.double().T * (flat.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    mixes = mixes * weights.scale.double() + weights.base.double()
    gates = mixes[:, : 2 * num].sigmoid()
    comb = mixes[:, 2 * num :].reshape(-1, num, num).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return Mix((gates[:, :num] + eps).float(), (2 * gates[:, num:]).float(), comb.float())


def _collapse(streams: torch.Tensor, pre: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    return rounding((streams.double() * pre.double().unsqueeze(-1)).sum(1).float())


def _expand(y: torch.Tensor, streams: torch.Tensor, mixed: Mix, rounding: Rounding) -> torch.Tensor:
    moved = torch.einsum("rij,rid->rjd", mixed.comb.double(), streams.double())
    return rounding((moved + mixed.post.double().unsqueeze(2) * y.double().unsqueeze(1)).float())
