"""Single-Pass mHC: mixing coefficients, collapse of the streams to one, expansion back (spec §2.3)."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.ops.linear import linear
from kernels.ops.rounding import Rounding, sigmoid


class MixWeights(NamedTuple):
    """`fn` [(2 + C) C, C dim], `base` [(2 + C) C], `scale` expanded to the length of base; all fp32."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


class Mix(NamedTuple):
    """`pre` [rows, C] weights of a collapse, `post` [rows, C] and `comb` [rows, source, target] of an expansion."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def mix(streams: torch.Tensor, weights: MixWeights, eps: float, norm_eps: float, iterations: int) -> Mix:
    """Coefficients of one sub-layer from the residual `streams` [rows, C, dim] fp32."""
    flat = streams.flatten(1)
    scale = flat.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_()
    return coefficients(linear(flat, weights.fn).mul_(scale), weights, eps, iterations)


def coefficients(mixes: torch.Tensor, weights: MixWeights, eps: float, iterations: int) -> Mix:
    """The same from the normalised products `mixes` [rows, (2 + C) C]."""
    mixes = (mixes * weights.scale).add_(weights.base)
    num = math.isqrt(mixes.shape[1] + 1) - 1  # C, of (2 + C) C = (C + 1)² - 1 columns
    gates = sigmoid(mixes[:, : 2 * num])
    comb = sinkhorn(mixes[:, 2 * num :].reshape(-1, num, num), eps, iterations)
    return Mix(gates[:, :num] + eps, gates[:, num:] * 2.0, comb)


def sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """Rows [.., i, :] softmaxed, then alternately divided by column and row sums; [rows, C, C] -> the same shape.

    Some 160 operations on tiny arrays: they cost their call, not their arithmetic, and numpy's calls are a third
    of torch's. Both libraries name the two functions alike; addition and division are exactly rounded in both.
    """
    logits = logits.permute(1, 2, 0)
    comb = (logits - logits.amax(1, keepdim=True)).exp_().contiguous()
    xp: ModuleType = np if comb.device.type == "cpu" else torch
    array: Any = comb.numpy() if xp is np else comb
    add, divide = xp.add, xp.divide
    column_steps, column_sums = _sum_steps(array, 0, xp)
    row_steps, row_sums = _sum_steps(array, 1, xp)

    def normalise(steps: list[tuple[Any, Any, Any]], sums: Any, guard: float) -> None:
        for a, b, out in steps:
            add(a, b, out=out)
        if guard:
            add(sums, guard, out=sums)
        divide(array, sums, out=array)

    normalise(row_steps, row_sums, 0.0)
    add(array, eps, out=array)
    normalise(column_steps, column_sums, eps)
    for _ in range(iterations - 1):
        normalise(row_steps, row_sums, eps)
        normalise(column_steps, column_sums, eps)
    return comb.permute(2, 0, 1).contiguous()


def _sum_steps(array: Any, axis: int, xp: ModuleType) -> tuple[list[tuple[Any, Any, Any]], Any]:
    """Pairwise additions `(a, b, out)` that sum a [C, C, rows] array along `axis`, and the view of the sum."""

    def cut(source: Any, start: int, stop: int) -> Any:
        return source[start:stop] if axis == 0 else source[:, start:stop]

    steps: list[tuple[Any, Any, Any]] = []
    source, num = array, array.shape[axis]
    while num > 1:
        half = num // 2
        first = cut(source, 0, half)
        out = xp.empty_like(first)
        steps.append((first, cut(source, half, 2 * half), out))
        if num % 2:
            steps.append((cut(out, 0, 1), cut(source, num - 1, num), cut(out, 0, 1)))
        source, num = out, half
    return steps, source


def collapse(streams: torch.Tensor, pre: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Weighted sum of the streams [rows, C, dim] -> [rows, dim], rounded."""
    return rounding(torch.bmm(pre.unsqueeze(1), streams).squeeze(1))


def expand(y: torch.Tensor, streams: torch.Tensor, mixed: Mix, rounding: Rounding) -> torch.Tensor:
    """A sub-layer's output `y` [rows, dim] added to the re-mixed streams [rows, C, dim], rounded."""
    moved = torch.bmm(mixed.comb.transpose(1, 2), streams)
    return rounding(moved.add_(mixed.post.unsqueeze(2) * y.unsqueeze(1)))
