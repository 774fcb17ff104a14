"""Rows beyond one tile, where the small cases never come."""

import torch

from kernels.ops import attention, experts, index, linear, pack
from kernels.ops.experts import Routes
from kernels.ops.gpu import attention as gpu_attention
from kernels.ops.gpu import experts as gpu_experts
from kernels.ops.gpu import index as gpu_index
from kernels.ops.gpu import linear as gpu_linear
from kernels.ops.gpu import pack as gpu_pack
from kernels.ops.rounding import keep
from run.bench.gpu_case import SMALL, Draw, difference
from run.bench.gpu_cases import CASES

BY_NAME = {case.name: case for case in CASES}
MANY = SMALL._replace(rows=70, columns=33)
"""Row by row the same only at the same places of a tile: of the interpreter's products, numpy's, others may differ."""


def test_rows_of_two_tiles_of_a_product() -> None:
    x, weight = BY_NAME["linear"].make(Draw(MANY))
    got = gpu_linear.linear(x, weight)
    assert difference(got, linear.linear(x, weight)) < 2e-6
    assert torch.equal(gpu_linear.linear(x[64:], weight), got[64:])
    assert gpu_linear.linear(x[:0], weight).shape == (0, 33)


def test_rows_of_two_tiles_of_an_fp8_product() -> None:
    x, weight = BY_NAME["FP8 linear"].make(Draw(MANY))
    got = gpu_linear.fp8_linear(x, weight)
    assert difference(got, linear.fp8_linear(x, weight)) < 2e-6
    assert torch.equal(gpu_linear.fp8_linear(x[64:], weight), got[64:])


def test_experts_with_no_row_and_with_more_than_a_tile() -> None:
    x, _, up, down, limit, _ = BY_NAME["FP4 experts, fp32"].make(Draw(SMALL._replace(rows=40)))
    picked = torch.tensor([[4, 1]] * 35 + [[1, 2]] * 5)  # experts 0 and 3 get nothing, 1 gets forty
    routes = Routes(picked, torch.rand(40, 2, generator=torch.Generator().manual_seed(0)))
    got = gpu_experts.run_fp4_experts(x, routes, up, down, limit, keep)
    want = experts.run_fp4_experts(x, routes, up, down, limit, keep)
    assert difference(got, want) < 5e-3
    some = Routes(picked[33:37], routes.weights[33:37])
    assert torch.equal(gpu_experts.run_fp4_experts(x[33:37], some, up, down, limit, keep), got[33:37])


def test_index_scores_of_many_rows_of_one_request() -> None:
    case = BY_NAME["index scores, candidates, bf16"]
    q, weights, cache, visible, mask, rounding = case.make(Draw(SMALL._replace(rows=6)))
    shared = index.Cache(cache.pages, cache.tables[:2])
    got = gpu_index.cached_scores(q, weights, shared, visible, mask, rounding)
    assert difference(got, index.cached_scores(q, weights, shared, visible, mask, rounding)) < 4e-3


def test_windows_and_picks_are_named_where_a_cpu_copies_them() -> None:
    """The same keys, whether read where they lie or gathered: for two requests of three rows each."""
    q, _, picked, sink, scale, rotation, rounding = BY_NAME["attention, fp32"].make(Draw(SMALL._replace(rows=6)))
    generator = torch.Generator().manual_seed(0)
    run = torch.randn(2, 4 + 3, SMALL.head_dim, generator=generator)
    window = attention.Window(2, 5, torch.tensor([4, 3, 2, 0, 0, 0]))
    pages, tables = picked.cache[:192].view(3, 64, -1), torch.tensor([[2, 0], [1, 2]])
    picks = torch.randint(-1, 128, (6, 70), generator=generator)
    want = attention.sparse_attend(
        q,
        attention.sliding(pack.window_rows(run.flatten(0, 1)).view(2, 7, -1), window),
        attention.picked(pages, tables, picks),
        sink,
        scale,
        rotation,
        rounding,
    )
    records = gpu_pack.window_rows(run.flatten(0, 1)).view(2, 7, -1)
    got = gpu_attention.sparse_attend(
        q,
        gpu_attention.sliding(records, window),
        gpu_attention.picked(pages, tables, picks),
        sink,
        scale,
        rotation,
        rounding,
    )
    assert difference(got, want) < 2e-6
