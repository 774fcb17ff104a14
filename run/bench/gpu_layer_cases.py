"""Inputs for the kernels of a layer: products, experts, mixes, compressor, Engram, sampling."""

from __future__ import annotations

from typing import Any

import torch

from kernels.ops.experts import Fp4Weights, Routes
from kernels.ops.linear import Fp8Weight
from kernels.ops.mix import Mix, MixWeights
from kernels.ops.rounding import Rounding, keep, to_bf16
from run.bench.gpu_case import Case, Draw, num_bytes


def _scales(draw: Draw, *shape: int) -> torch.Tensor:
    """E8M0 scales of matrices whose products stay near one."""
    return draw.integers(116, 124, *shape).to(torch.uint8).view(torch.float8_e8m0fnu)


def _linear(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    weight = torch.randn(s.columns, s.dim, generator=draw.generator) * s.dim**-0.5
    return (torch.randn(s.rows, s.dim, generator=draw.generator), weight)


def _fp8_linear(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    codes = torch.randn(s.columns, s.dim, generator=draw.generator).mul_(100).to(torch.float8_e4m3fn)
    return (draw.normal(s.rows, s.dim), Fp8Weight(codes, _scales(draw, -(-s.columns // 32), s.dim // 32)))


def _route(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    logits = torch.randn(s.rows, s.routed, generator=draw.generator) * 6
    logits[:, 1] = logits[:, 0]
    bias = torch.rand(s.routed, generator=draw.generator)
    bias[1] = bias[0]  # equal ones: the lower id first
    return (logits, bias, s.expert_picks, 1.5)


def _route_images(draw: Draw) -> tuple[Any, ...]:
    logits, bias, num_picks, factor = _route(draw)
    is_image = torch.arange(len(logits))[:, None] % 3 == 1
    return (logits, torch.where(is_image, bias.flip(0), bias), num_picks, factor)


def _experts(rounding: Rounding) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        s = draw.sizes

        def weights(n: int, k: int) -> Fp4Weights:
            return Fp4Weights(draw.codes(s.experts, n, k // 2), _scales(draw, s.experts, n, k // 32))

        scores = torch.rand(s.rows, s.experts, generator=draw.generator)
        weight = torch.rand(s.rows, s.expert_picks, generator=draw.generator)
        routes = Routes(scores.topk(s.expert_picks).indices, weight)
        x = torch.randn(s.rows, s.dim, generator=draw.generator).bfloat16().float()
        return (x, routes, weights(2 * s.inter, s.dim), weights(s.dim, s.inter), 10.0, rounding)

    def moved(args: tuple[Any, ...], result: torch.Tensor) -> int:
        x, routes, up, down = args[:4]
        each = num_bytes((up, down)) // len(up.codes)
        return len(routes.experts.unique()) * each + num_bytes((x, routes, result))

    kind = "bf16" if rounding is to_bf16 else "fp32"
    return Case(f"FP4 experts, {kind}", "experts.run_fp4_experts", make, (0, 1), 5e-3, moved)


def _streams(draw: Draw) -> torch.Tensor:
    s = draw.sizes
    return torch.randn(s.rows, s.streams, s.dim, generator=draw.generator).bfloat16().float()


def _mix(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    columns = (2 + s.streams) * s.streams
    fn = torch.randn(columns, s.streams * s.dim, generator=draw.generator) * (s.streams * s.dim) ** -0.5
    base, scale = (torch.randn(columns, generator=draw.generator) for _ in range(2))
    return (_streams(draw), MixWeights(fn, base, scale), 1e-6, 1e-20, 20)


def _collapse(draw: Draw) -> tuple[Any, ...]:
    return (_streams(draw), torch.rand(draw.sizes.rows, draw.sizes.streams, generator=draw.generator), keep)


def _collapse_norm(draw: Draw) -> tuple[Any, ...]:
    streams, pre, _ = _collapse(draw)
    return (streams, pre, torch.rand(draw.sizes.dim, generator=draw.generator), 1e-20, to_bf16)


def _norm(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    x = draw.normal(s.rows, s.dim)
    x[0] = 0.0  # gives zeros, with statistics of zero
    return (x, torch.rand(s.dim, generator=draw.generator), 1e-20, keep)


def _expand(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    comb = torch.rand(s.rows, s.streams, s.streams, generator=draw.generator)
    post, pre = (torch.rand(s.rows, s.streams, generator=draw.generator) for _ in range(2))
    return (draw.normal(s.rows, s.dim), _streams(draw), Mix(pre, post, comb), to_bf16)


def _pairs(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    first, second = (torch.randn(s.rows, 2, s.head_dim, generator=draw.generator) * 3 for _ in range(2))
    return (first, second, torch.rand(s.head_dim, generator=draw.generator), 1e-20, keep)


def _look_up(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    codes = torch.randn(s.rows, 24, s.memory, generator=draw.generator).to(torch.float8_e4m3fn)
    return (codes, _scales(draw, s.rows, 24, s.memory // 32))


def _gated(rounding: Rounding) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        s = draw.sizes
        projected = torch.randn(s.rows, (s.streams + 1) * s.dim, generator=draw.generator)
        weight = torch.randn(s.streams, s.dim, generator=draw.generator)
        return (_streams(draw), projected, weight, draw.integers(0, 2, s.rows, 1).float(), rounding)

    kind = "bf16" if rounding is to_bf16 else "fp32"
    tolerance = 2e-3 if rounding is to_bf16 else 2e-6
    return Case(f"Engram gate, {kind}", "engram.add_gated", make, (0, 1, 3), tolerance)


def _sample(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    logits = torch.randn(s.rows, s.vocab, generator=draw.generator) * 4
    logits[:, :: s.vocab // 3] = -torch.inf  # masked
    row = torch.arange(s.rows)
    temperature = torch.where(row % 3 == 2, 0.0, 0.3 + row * 0.05)
    top_p = torch.where(row % 2 == 0, 0.9, 1.0)
    return (logits, temperature, top_p, draw.integers(-(2**62), 2**62, s.rows), row * 1000)


LAYER_CASES = [
    Case("linear", "linear.linear", _linear, (0,), 2e-6),
    Case("FP8 linear", "linear.fp8_linear", _fp8_linear, (0,), 2e-6),
    Case("route", "experts.route", _route, (0,), 1e-6),
    Case("route with images", "experts.route", _route_images, (0, 1), 1e-6),
    _experts(keep),
    _experts(to_bf16),
    Case("mix", "mix.mix", _mix, (0,), 1e-5),
    Case("collapse", "mix.collapse", _collapse, (0, 1), 1e-6),
    Case("collapse and norm", "mix.collapse_norm", _collapse_norm, (0, 1), 2e-3),
    Case("norm", "rounding.rms_norm", _norm, (0,), 1e-6),
    Case("pool pairs", "compress.pool_norm", _pairs, (0, 1), 1e-6),
    Case("Engram look-up", "engram.look_up", _look_up, (0, 1)),
    _gated(keep),
    _gated(to_bf16),
    Case("sample", "sample.sample", _sample, (0, 1, 2, 3, 4)),
    Case("expand", "mix.expand", _expand, (0, 1, 2), 2e-3),
]
