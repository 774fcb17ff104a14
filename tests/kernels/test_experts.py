import pytest
import torch

from kernels.experts import LocalExperts
from kernels.model import Model
from kernels.ops.experts import Fp4Weights, Routes, activate, route, run_experts, run_fp4_experts
from kernels.ops.quant import dequantize_fp4, fp8_qdq
from kernels.ops.rounding import keep
from tests.kernels.conftest import golden


@pytest.mark.oracle
@pytest.mark.parametrize("layer", [0, 9])
def test_gate_and_experts_of_a_layer(mini_bf16: Model, layer: int) -> None:
    data = {k.removeprefix(f"layers.{layer}."): v for k, v in golden("mini/moe_mhc").items()}
    moe, config = mini_bf16.blocks[layer].moe, mini_bf16.config
    x = data["x"].float()
    _, logits = moe.w_in.forward(x)
    routes = route(logits, moe.bias, config.num_experts_per_tok, config.routed_scaling_factor)
    got, want = routes.experts.sort(-1), data["gate_indices"].long().sort(-1)
    assert torch.equal(got.values, want.values)
    weights = data["gate_weights"].gather(1, want.indices)
    torch.testing.assert_close(routes.weights.gather(1, got.indices), weights, rtol=0, atol=1e-6)
    only = Routes(torch.zeros(20, 1, dtype=torch.int64), torch.full((20, 1), 0.7))
    experts = moe.experts
    assert isinstance(experts, LocalExperts)
    first = run_experts(x, only, experts.up, experts.down, config.swiglu_limit, mini_bf16.round, keep)
    want_first = data["expert0_out_w0.7"].float()
    assert (first - want_first).square().mean().sqrt() <= 0.01 * want_first.square().mean().sqrt()


def test_clamps_come_before_the_activation() -> None:
    h = torch.tensor([[50.0, -50.0, 1.0, 50.0, -50.0, -50.0]])
    silu_10 = 10 / (1 + torch.tensor(-10.0).exp())
    want = torch.tensor([[silu_10 * 10, 0.0, 1 / (1 + torch.tensor(-1.0).exp()) * -10]])
    torch.testing.assert_close(activate(h, 10.0), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num", [5, 8, 33])
def test_a_row_alone_is_routed_and_activated_as_in_company(num: int) -> None:
    generator = torch.Generator().manual_seed(num)
    logits, bias = torch.randn(131, num, generator=generator) * 6, torch.rand(131, num, generator=generator)
    logits[:, 1], bias[:, 1] = logits[:, 0], bias[:, 0]  # equal ones: the lower id first
    whole, h = route(logits, bias, 3, 1.5), torch.randn(131, 2 * num, generator=generator) * 20
    active = activate(h, 10.0)
    picked = (torch.nn.functional.softplus(logits).sqrt() + bias).sort(stable=True, descending=True).indices[:, :3]
    assert torch.equal(whole.experts, picked)
    torch.testing.assert_close(whole.weights.sum(1), torch.full((131,), 1.5))
    for row in range(131):
        only = slice(row, row + 1)
        one = route(logits[only], bias[only], 3, 1.5)
        assert torch.equal(one.experts, whole.experts[only]) and torch.equal(one.weights, whole.weights[only])
        assert torch.equal(activate(h[only], 10.0), active[only])


def test_grouping_equals_one_row_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 64, generator=generator)
    w13, w2 = torch.randn(7, 64, 64, generator=generator), torch.randn(7, 64, 32, generator=generator)
    picked = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(37)])
    routes = Routes(picked, torch.rand(37, 3, generator=generator))
    together = run_experts(x, routes, w13, w2, 10.0, keep, keep)
    alone = [
        run_experts(x[i : i + 1], Routes(picked[i : i + 1], routes.weights[i : i + 1]), w13, w2, 10.0, keep, keep)
        for i in range(37)
    ]
    assert torch.equal(together, torch.cat(alone))
    dense = sum(
        torch.where(picked == e, routes.weights, 0.0).sum(1, keepdim=True) * (activate(x @ w13[e].T, 10.0) @ w2[e].T)
        for e in range(7)
    )
    torch.testing.assert_close(together, dense, rtol=1e-4, atol=1e-3)


def test_packed_weights_give_what_unpacked_ones_give() -> None:
    generator = torch.Generator().manual_seed(0)

    def packed(n: int, k: int) -> Fp4Weights:
        scale = torch.randint(118, 124, (3, n, k // 32), dtype=torch.uint8, generator=generator)
        codes = torch.randint(0, 256, (3, n, k // 2), dtype=torch.uint8, generator=generator)
        return Fp4Weights(codes, scale.view(torch.float8_e8m0fnu))

    up, down = packed(64, 96), packed(96, 32)
    x = torch.randn(5, 96, generator=generator)
    routes = Routes(torch.tensor([[0, 2], [2, 1], [0, 1], [1, 2], [2, 0]]), torch.rand(5, 2, generator=generator))
    w13, w2 = (torch.stack([dequantize_fp4(*one) for one in zip(*both, strict=True)]) for both in (up, down))
    want = run_experts(fp8_qdq(x), routes, w13, w2, 10.0, keep, fp8_qdq)
    assert torch.equal(run_fp4_experts(x, routes, up, down, 10.0, keep), want)
