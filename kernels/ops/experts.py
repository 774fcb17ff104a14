"""The router and the routed experts (spec §2.4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kernels.ops.linear import ROW_TILE, linear
from kernels.ops.rounding import Rounding, silu, softplus

_ROUTE_EPS = 1e-20


class Routes(NamedTuple):
    """`experts` [rows, picks] int64, best first, and their `weights` [rows, picks] fp32."""

    experts: torch.Tensor
    weights: torch.Tensor


def route(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, num_picks: int, factor: float) -> Routes:
    """Pick experts for `x` [rows, dim]: by score plus `bias` [experts] (equal: the lower id), weighted by score."""
    score = softplus(linear(x, gate)).sqrt_()
    picked = (score + bias).sort(stable=True, dim=-1, descending=True).indices[:, :num_picks]
    weights = score.gather(1, picked)
    if num_picks > 1:
        weights = weights / weights.sum(-1, keepdim=True).add_(_ROUTE_EPS)
    return Routes(picked, weights * factor)


def activate(h: torch.Tensor, limit: float) -> torch.Tensor:
    """`h` [rows, 2 * inter], gate half then up half -> clamped silu(gate) * up [rows, inter], unrounded."""
    gate, up = h.chunk(2, -1)
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def run_experts(
    x: torch.Tensor, routes: Routes, w13: torch.Tensor, w2: torch.Tensor, limit: float, rounding: Rounding
) -> torch.Tensor:
    """Sum of the picked experts' outputs for `x` [rows, dim].

    `w13` is [experts, 2 inter, dim], gate rows then up rows; `w2` [experts, dim, inter]. Rows are grouped by expert
    in whole row tiles; a row's picks are added in pick order, in FP32.
    """
    num_rows, num_picks = routes.experts.shape
    tiles = _group(routes.experts.numpy(), w13.shape[0])
    h = rounding(_per_expert(x[tiles.source], w13, tiles))
    h = activate(h, limit)
    weights = routes.weights.reshape(-1)[tiles.route]
    out = rounding(_per_expert(rounding(h.mul_(weights.unsqueeze(1))), w2, tiles))
    picked = out[tiles.place].view(num_rows, num_picks, -1)
    total = picked[:, 0]
    for pick in range(1, num_picks):
        total = total + picked[:, pick]
    return total


class _Tiles(NamedTuple):
    """`source` row and `route` (flat row, pick) of every grouped row, `place` of every route, `spans` per expert."""

    source: torch.Tensor
    route: torch.Tensor
    place: torch.Tensor
    spans: list[tuple[int, int, int]]  # expert, first grouped row, end


def _group(picked: np.ndarray[tuple[int, int], np.dtype[np.int64]], num_experts: int) -> _Tiles:
    flat = picked.reshape(-1)
    counts = np.bincount(flat, minlength=num_experts)
    room = -(-counts // ROW_TILE) * ROW_TILE
    ends = np.cumsum(room)
    order = np.argsort(flat, kind="stable")
    chosen = flat[order]
    rank = np.arange(len(flat)) - (np.cumsum(counts) - counts)[chosen]
    position = (ends - room)[chosen] + rank
    # Rows that only fill a tile repeat route 0: their results are never read.
    route = np.zeros(int(ends[-1]), dtype=np.int64)
    route[position] = order
    place = np.empty(len(flat), dtype=np.int64)
    place[order] = position
    spans = [(int(e), int(ends[e] - room[e]), int(ends[e])) for e in np.flatnonzero(counts)]
    source = torch.from_numpy(route // picked.shape[1])
    return _Tiles(source, torch.from_numpy(route), torch.from_numpy(place), spans)


def _per_expert(x: torch.Tensor, weights: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    parts = [linear(x[start:end], weights[expert]) for expert, start, end in tiles.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
