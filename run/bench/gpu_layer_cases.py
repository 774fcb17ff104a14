"""Inputs for the kernels of a layer: products, experts, mixes, compressor, Engram, sampling."""

from __future__ import annotations

from typing import Any

import torch

from kernels.ops.experts import Fp4Weights, Routes
from kernels.ops.linear import Fp8Weight
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


LAYER_CASES = [
    Case("linear", "linear.linear", _linear, (0,), 2e-6),
    Case("FP8 linear", "linear.fp8_linear", _fp8_linear, (0,), 2e-6),
    _experts(keep),
    _experts(to_bf16),
]
