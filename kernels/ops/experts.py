"""The router and the routed experts (spec §2.4)."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.dispatch import by_device
from kernels.ops.linear import ROW_TILE, Array, by_columns, multiply
from kernels.ops.quant import dequantize_fp4, fp8_qdq
from kernels.ops.rounding import Rounding

# Operands of numpy calls are arrays without axes: numbers take half as long again.
_ROUTE_EPS = np.array(1e-20, dtype=np.float32)
_ZERO, _ONE = np.array(0.0, dtype=np.float32), np.array(1.0, dtype=np.float32)


class Routes(NamedTuple):
    """`experts` [rows, picks] int64, best first, and their `weights` [rows, picks] fp32."""

    experts: torch.Tensor
    weights: torch.Tensor


@by_device
def route(logits: torch.Tensor, bias: torch.Tensor, num_picks: int, factor: float) -> Routes:
    """Pick experts by score plus `bias` [experts] (equal: the lower id), weighted by score alone.

    `bias` may be [rows, experts] too. `logits` [rows, experts] are the gate's unrounded products; a score is
    sqrt(softplus(logit)).
    """
    values = logits.numpy()
    score = np.negative(np.abs(values))
    np.exp(score, out=score)
    np.log1p(score, out=score)
    score += np.maximum(values, _ZERO)
    np.sqrt(score, out=score)
    negated = np.negative(score + bias.numpy())
    picked = negated.argsort(1, kind="stable")[:, :num_picks]
    weights = score.ravel()[picked + np.arange(0, score.size, score.shape[1])[:, None]]
    if num_picks > 1:
        weights /= weights.sum(1, keepdims=True) + _ROUTE_EPS
    weights *= np.float32(factor)
    return Routes(torch.from_numpy(np.ascontiguousarray(picked)), torch.from_numpy(weights))


@by_device
def activate(h: torch.Tensor, limit: float) -> torch.Tensor:
    """`h` [rows, 2 * inter], gate half then up half -> clamped silu(gate) * up [rows, inter], unrounded."""
    values, most = h.numpy(), np.float32(limit)
    inter = values.shape[1] // 2
    gate = np.minimum(values[:, :inter], most)
    up = np.minimum(values[:, inter:], most)
    np.maximum(up, -most, out=up)
    up *= gate
    np.negative(gate, out=gate)
    with np.errstate(over="ignore"):  # a gate of zero
        np.exp(gate, out=gate)
    gate += _ONE
    return torch.from_numpy(np.divide(up, gate, out=up))


@by_device
def run_experts(
    x: torch.Tensor,
    routes: Routes,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    rounding: Rounding,
    quantize: Rounding,
) -> torch.Tensor:
    """Sum of the picked experts' outputs for `x` [rows, dim], which is quantised already where weights are.

    `w13` is [experts, 2 inter, dim], gate rows then up rows; `w2` [experts, dim, inter]. Rows are grouped by expert
    in whole row tiles; a row's picks are added in pick order, in FP32. `quantize` is applied to the input of the
    second product: `fp8_qdq` for weights that are stored quantised, else `keep`.
    """
    num_rows, num_picks = routes.experts.shape
    tiles = _group(routes.experts.numpy(), len(w13))
    grouped = x.numpy()[tiles.source]
    h = activate(rounding(_per_expert(grouped, w13.numpy(), tiles)), limit)
    weights = np.zeros((len(grouped), 1), dtype=np.float32)  # of rows that fill a tile: no product with anything
    weights[tiles.place, 0] = routes.weights.numpy().ravel()
    hidden = quantize(rounding(h.mul_(torch.from_numpy(weights))))
    out = rounding(_per_expert(hidden.numpy(), w2.numpy(), tiles)).numpy()
    return add_picks(torch.from_numpy(out[tiles.place].reshape(num_rows, num_picks, -1)))


def add_picks(outputs: torch.Tensor) -> torch.Tensor:
    """The sum over the picks of each row, `outputs` [rows, picks, dim] fp32 -> [rows, dim], added in pick order."""
    return reduce(torch.add, outputs.unbind(1))


class Fp4Weights(NamedTuple):
    """Matrices of all experts as stored: E2M1 `codes` [experts, n, k / 2], low nibble first, and E8M0 `scale`
    [experts, n, k / 32]."""

    codes: torch.Tensor
    scale: torch.Tensor


@by_device
def run_fp4_experts(
    x: torch.Tensor, routes: Routes, up: Fp4Weights, down: Fp4Weights, limit: float, rounding: Rounding
) -> torch.Tensor:
    """`run_experts` with packed weights: `up` holds w1's rows, then w3's; `down` w2's."""
    w13, w2 = _unpacked(up), _unpacked(down)
    return run_experts(fp8_qdq(x), routes, w13, w2, limit, rounding, fp8_qdq)


def _unpacked(weights: Fp4Weights) -> torch.Tensor:
    num, n = weights.codes.shape[:2]
    return by_columns(dequantize_fp4(weights.codes.flatten(0, 1), weights.scale.flatten(0, 1)).view(num, n, -1))


class _Tiles(NamedTuple):
    """The `source` row of every grouped row, the `place` of every route (row, pick) among them, `spans` per expert."""

    source: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    spans: list[tuple[int, int, int]]  # expert, first grouped row, end


def _group(picked: npt.NDArray[np.int64], num_experts: int) -> _Tiles:
    routes = picked.ravel()
    order = routes.argsort(kind="stable")
    counts = np.bincount(routes, minlength=num_experts)
    padded = -(-counts // ROW_TILE) * ROW_TILE
    ends = padded.cumsum()
    starts = ends - padded
    # Of the routes in order of their experts: how far each is behind where it would stand if no tile were filled.
    shift = (starts - counts.cumsum() + counts)[routes[order]]
    place = np.empty_like(order)
    place[order] = shift + np.arange(len(order))
    source = np.zeros(ends[-1], dtype=np.int64)  # rows that only fill a tile repeat row 0: their results are not read
    source[place] = np.arange(len(order)) // picked.shape[1]
    used = np.flatnonzero(counts)
    return _Tiles(source, place, list(zip(used.tolist(), starts[used].tolist(), ends[used].tolist(), strict=True)))


def _per_expert(x: Array, weights: Array, tiles: _Tiles) -> torch.Tensor:
    out = np.empty((len(x), weights.shape[1]), dtype=np.float32)
    for expert, start, end in tiles.spans:
        multiply(x[start:end], weights[expert], out[start:end])
    return torch.from_numpy(out)
