"""The router and the routed experts (spec §2.4)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.ops.dispatch import by_device
from kernels.ops.linear import linear, padded_rows
from kernels.ops.quant import dequantize_fp4, fp8_qdq
from kernels.ops.rounding import Rounding, scalar, silu, softplus

_ROUTE_EPS = 1e-20


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
    score = softplus(logits).sqrt_()
    picked = (score + bias).sort(stable=True, dim=-1, descending=True).indices[:, :num_picks]
    weights = score.gather(1, picked)
    if num_picks > 1:
        weights = weights / weights.sum(-1, keepdim=True).add_(scalar(_ROUTE_EPS))
    return Routes(picked, weights * scalar(factor))


def activate(h: torch.Tensor, limit: float) -> torch.Tensor:
    """`h` [rows, 2 * inter], gate half then up half -> clamped silu(gate) * up [rows, inter], unrounded."""
    gate, up = h.chunk(2, -1)
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def run_experts(
    x: torch.Tensor,
    routes: Routes,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    rounding: Rounding,
    quantize: Rounding,
) -> torch.Tensor:
    """Sum of the picked experts' outputs for `x` [rows, dim].

    `w13` is [experts, 2 inter, dim], gate rows then up rows; `w2` [experts, dim, inter]. Rows are grouped by expert
    in whole row tiles; a row's picks are added in pick order, in FP32. `quantize` is applied to the inputs of both
    products: `fp8_qdq` for weights that are stored quantised, else `keep`.
    """
    num_rows, num_picks = routes.experts.shape
    tiles = _group(routes.experts)
    h = rounding(_per_expert(quantize(x).index_select(0, tiles.source), w13, tiles))
    h = activate(h, limit)
    weights = routes.weights.reshape(-1)[tiles.route]
    out = rounding(_per_expert(quantize(rounding(h.mul_(weights.unsqueeze(1)))), w2, tiles))
    picked = out.index_select(0, tiles.place).view(num_rows, num_picks, -1)
    total = picked[:, 0]
    for pick in range(1, num_picks):
        total = total + picked[:, pick]
    return total


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
    return run_experts(x, routes, w13, w2, limit, rounding, fp8_qdq)


def _unpacked(weights: Fp4Weights) -> torch.Tensor:
    num, n = weights.codes.shape[:2]
    return dequantize_fp4(weights.codes.flatten(0, 1), weights.scale.flatten(0, 1)).view(num, n, -1)


class _Tiles(NamedTuple):
    """`source` row and `route` (flat row, pick) of every grouped row, `place` of every route, `spans` per expert."""

    source: torch.Tensor
    route: torch.Tensor
    place: torch.Tensor
    spans: list[tuple[int, int, int]]  # expert, first grouped row, end


def _group(picked: torch.Tensor) -> _Tiles:
    num_picks = picked.shape[1]
    members: dict[int, list[int]] = {}
    for route, expert in enumerate(picked.reshape(-1).tolist()):
        members.setdefault(expert, []).append(route)
    routes: list[int] = []
    place = [0] * picked.numel()
    spans = []
    for expert in sorted(members):
        start = len(routes)
        for number, route in enumerate(members[expert], start):
            place[route] = number
        routes += members[expert]
        # Rows that only fill a tile repeat route 0: their results are never read.
        routes += [0] * (padded_rows(len(routes)) - len(routes))
        spans.append((expert, start, len(routes)))
    grouped = torch.tensor(routes, device=picked.device)
    return _Tiles(grouped // num_picks, grouped, torch.tensor(place, device=picked.device), spans)


def _per_expert(x: torch.Tensor, weights: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    parts = [linear(x[start:end], weights[expert]) for expert, start, end in tiles.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
