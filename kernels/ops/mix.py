"""Single-Pass mHC: mixing coefficients, collapse of the streams to one, expansion back (spec §2.3)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.dispatch import by_device
from kernels.ops.linear import enough_items, linear
from kernels.ops.rounding import Rounding, inverse_rms, rms_norm, scalar, sigmoid

_Array = npt.NDArray[np.float32]
_Call = tuple[np.ufunc, _Array, _Array, _Array]


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


@by_device
def mix(streams: torch.Tensor, weights: MixWeights, eps: float, norm_eps: float, iterations: int) -> Mix:
    """Coefficients of one sub-layer from the residual `streams` [rows, C, dim] fp32."""
    flat = streams.flatten(1)
    mixes = linear(flat, weights.fn).mul_(inverse_rms(flat, norm_eps))
    return coefficients(mixes, weights, eps, iterations)


def coefficients(mixes: torch.Tensor, weights: MixWeights, eps: float, iterations: int) -> Mix:
    """The same from the normalised products `mixes` [rows, (2 + C) C]."""
    mixes = (mixes * weights.scale).add_(weights.base)
    num = math.isqrt(mixes.shape[1] + 1) - 1  # C, of (2 + C) C = (C + 1)² - 1 columns
    gates = sigmoid(mixes[:, : 2 * num])
    comb = sinkhorn(mixes[:, 2 * num :].reshape(-1, num, num), eps, iterations)
    return Mix(gates[:, :num] + scalar(eps), gates[:, num:] * scalar(2.0), comb)


def sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """Rows [.., i, :] softmaxed, then alternately divided by column and row sums; [rows, C, C] -> the same shape.

    Some 160 operations on tiny arrays: they cost their call, not their arithmetic, and numpy's calls are a third of
    torch's (0.1 ms against 0.3 ms for 4 rows). Additions and divisions only: exactly rounded wherever they stand.
    """
    logits = logits.permute(1, 2, 0)
    comb = (logits - logits.amax(1, keepdim=True)).exp_().contiguous()
    array = comb.numpy()
    guard = np.array(eps, dtype=np.float32)
    columns, rows = _division_by_sums(array, 0, guard), _division_by_sums(array, 1, guard)
    softmax = [call for call in rows if call[2] is not guard]
    _run(softmax)
    np.add(array, guard, array)
    _run(columns)
    for _ in range(iterations - 1):
        _run(rows)
        _run(columns)
    return comb.permute(2, 0, 1).contiguous()


def _run(calls: list[_Call]) -> None:
    for function, a, b, out in calls:
        function(a, b, out)


def _division_by_sums(array: _Array, axis: int, guard: _Array) -> list[_Call]:
    """Calls that divide `array` [C, C, rows] in place by its sums along `axis` plus `guard`, added pairwise."""

    def cut(source: _Array, start: int, stop: int) -> _Array:
        return source[start:stop] if axis == 0 else source[:, start:stop]

    calls: list[_Call] = []
    source, num = array, array.shape[axis]
    while num > 1:
        half = num // 2
        first = cut(source, 0, half)
        out = np.empty(first.shape, dtype=np.float32)
        calls.append((np.add, first, cut(source, half, 2 * half), out))
        if num % 2:
            calls.append((np.add, cut(out, 0, 1), cut(source, num - 1, num), cut(out, 0, 1)))
        source, num = out, half
    calls.append((np.add, source, guard, source))
    calls.append((np.divide, array, source, array))
    return calls


@by_device
def collapse(streams: torch.Tensor, pre: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Weighted sum of the streams [rows, C, dim] -> [rows, dim], rounded."""
    product = torch.bmm(enough_items(pre.unsqueeze(1)), enough_items(streams))
    return rounding(product[: pre.shape[0]].squeeze(1))


@by_device
def collapse_norm(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding
) -> torch.Tensor:
    """`collapse`, then the RMS norm with `weight` [dim]: what a sub-layer reads, [rows, dim], rounded after both."""
    return rms_norm(collapse(streams, pre, rounding), weight, eps, rounding)


def mean_stream(streams: torch.Tensor) -> torch.Tensor:
    """The mean of the streams [rows, C, dim] -> [rows, dim], added in order; unrounded."""
    total = streams[:, 0].clone()
    for number in range(1, streams.shape[1]):
        total += streams[:, number]
    return total.div_(streams.shape[1])


@by_device
def expand(y: torch.Tensor, streams: torch.Tensor, mixed: Mix, rounding: Rounding) -> torch.Tensor:
    """A sub-layer's output `y` [rows, dim] added to the re-mixed streams [rows, C, dim], rounded."""
    moved = torch.bmm(enough_items(mixed.comb.transpose(1, 2)), enough_items(streams))[: y.shape[0]]
    return rounding(moved.add_(mixed.post.unsqueeze(2) * y.unsqueeze(1)))
