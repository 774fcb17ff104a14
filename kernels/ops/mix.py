"""Single-Pass mHC: mixing coefficients, collapse of the streams to one, expansion back (spec §2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from kernels.ops.dispatch import by_device
from kernels.ops.linear import HEIGHTS, cuts, linear, padded_rows
from kernels.ops.rounding import Array, Rounding, inverse_rms, rms_norm

_Sum = Callable[[Array, Array], None]  # of `terms` into an array of sums
_ONE, _TWO = np.array(1.0, dtype=np.float32), np.array(2.0, dtype=np.float32)


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
    mixes = linear(flat, weights.fn)
    values = mixes.numpy()
    values *= inverse_rms(flat.numpy(), norm_eps)[:, None]
    return coefficients(mixes, weights, eps, iterations)


def coefficients(mixes: torch.Tensor, weights: MixWeights, eps: float, iterations: int) -> Mix:
    """The same from the normalised products `mixes` [rows, (2 + C) C]."""
    values = mixes.numpy() * weights.scale.numpy()
    values += weights.base.numpy()
    num = math.isqrt(values.shape[1] + 1) - 1  # C, of (2 + C) C = (C + 1)² - 1 columns
    gates = np.negative(values[:, : 2 * num])
    with np.errstate(over="ignore"):  # a gate of zero
        np.exp(gates, out=gates)
    gates += _ONE
    np.reciprocal(gates, out=gates)
    pre, post = gates[:, :num] + _constant(eps), gates[:, num:] * _TWO
    comb = sinkhorn(values[:, 2 * num :].reshape(-1, num, num), eps, iterations)
    return Mix(torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(comb))


def sinkhorn(logits: Array, eps: float, iterations: int) -> Array:
    """Rows [.., i, :] softmaxed, then alternately divided by column and row sums; [rows, C, C] -> the same shape."""
    rows, num = logits.shape[:2]
    out = np.empty((rows, num * num), dtype=np.float32)
    for start, end in cuts(padded_rows(rows), HEIGHTS):
        part = logits[start:end]
        # Summands by column: the C * C values of every row, then the guard of the denominators.
        terms = np.zeros((num * num + 1, end - start), dtype=np.float32)
        values, cube = terms[:-1], terms[:-1].reshape(num, num, -1)
        cube[:, :, : len(part)] = part.transpose(1, 2, 0)
        cube -= cube.max(1, keepdims=True)
        np.exp(values, out=values)
        _balance(terms, num, eps, iterations)
        out[start:end] = values[:, : len(part)].T
    return out.reshape(rows, num, num)


def _balance(terms: Array, num: int, eps: float, iterations: int) -> None:
    """The divisions of `sinkhorn`, in place.

    Some 80 operations on tiny arrays cost their call, not their arithmetic. So all sums of one kind are one product
    with a matrix of ones and zeros, where a probe finds that it adds in order; else they are added one by one.
    """
    values, sums = terms[:-1], np.empty((num * num, terms.shape[1]), dtype=np.float32)
    over_columns, over_rows = _sums(num)
    divide = np.divide
    over_rows(terms, sums)
    divide(values, sums, values)
    values += _constant(eps)
    terms[-1] = eps
    over_columns(terms, sums)
    divide(values, sums, values)
    for _ in range(iterations - 1):
        over_rows(terms, sums)
        divide(values, sums, values)
        over_columns(terms, sums)
        divide(values, sums, values)


@cache
def _sums(num: int) -> tuple[_Sum, _Sum]:
    """Write the sum over i, and over j, that every value [i, j] of `terms` belongs to, guard included, into another."""
    if _products_add_in_order(num):
        over_columns, over_rows = (partial(np.dot, matrix) for matrix in _sum_matrices(num))
        return over_columns, over_rows
    return _adders(num)


def _adders(num: int) -> tuple[_Sum, _Sum]:
    """`_sums` without products: terms added one by one."""

    def added(axis: int) -> _Sum:
        def call(terms: Array, sums: Array) -> None:
            cube = terms[:-1].reshape(num, num, -1)
            total = cube[0] if axis == 0 else cube[:, 0]
            for number in range(1, num):
                total = total + (cube[number] if axis == 0 else cube[:, number])
            total = total + terms[-1]
            sums.reshape(cube.shape)[:] = total[None] if axis == 0 else total[:, None]

        return call

    return added(0), added(1)


@cache
def _sum_matrices(num: int) -> tuple[Array, Array]:
    """What takes `terms` to the sums of `_sums`."""
    ones, each = np.ones((num, num), dtype=np.float32), np.eye(num, dtype=np.float32)
    guard = np.ones((num * num, 1), dtype=np.float32)
    return np.hstack((np.kron(ones, each), guard)), np.hstack((np.kron(each, ones), guard))


@cache
def _products_add_in_order(num: int) -> bool:
    """Whether products with `_sum_matrices` have the bits of sums added in order, at every height."""
    terms = np.random.default_rng(num).random((num * num + 1, HEIGHTS[-1]), dtype=np.float32)
    for add, matrix in zip(_adders(num), _sum_matrices(num), strict=True):
        want = np.empty_like(terms[:-1])
        add(terms, want)
        if not all(np.array_equal(np.dot(matrix, terms[:, :height].copy()), want[:, :height]) for height in HEIGHTS):
            return False
    return True


@cache
def _constant(value: float) -> Array:
    return np.array(value, dtype=np.float32)


@by_device
def collapse(streams: torch.Tensor, pre: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Weighted sum of the streams [rows, C, dim] -> [rows, dim], rounded."""
    return rounding(torch.from_numpy(np.matmul(pre.numpy()[:, None], streams.numpy())[:, 0]))


@by_device
def collapse_norm(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding
) -> torch.Tensor:
    """`collapse`, then the RMS norm with `weight` [dim]: what a sub-layer reads, [rows, dim], rounded after both."""
    return rms_norm(collapse(streams, pre, rounding), weight, eps, rounding)


@by_device
def mean_streams_(out: torch.Tensor, streams: Sequence[torch.Tensor]) -> None:
    """Write the mean of the streams [rows, C, dim] of some layers, added in order, into `out` [rows, layers, dim];
    unrounded."""
    total = out.numpy()
    for number, each in enumerate(streams):
        np.add.reduce(each.numpy(), 1, out=total[:, number])  # not along the last axis, so in order
    total /= np.float32(streams[0].shape[1])


@by_device
def expand(y: torch.Tensor, streams: torch.Tensor, mixed: Mix, rounding: Rounding) -> torch.Tensor:
    """A sub-layer's output `y` [rows, dim] added to the re-mixed streams [rows, C, dim], rounded."""
    values = y.numpy()
    moved = np.matmul(mixed.comb.numpy().transpose(0, 2, 1), streams.numpy())  # a product per row, of a fixed shape
    moved += mixed.post.numpy()[:, :, None] * values[:, None]
    return rounding(torch.from_numpy(moved))
