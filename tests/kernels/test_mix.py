from functools import reduce

import pytest
import torch

from kernels.model import Model
from kernels.ops import mix as mix_module
from kernels.ops.mix import Mix, MixWeights, coefficients, collapse, expand, mean_streams_, mix, sinkhorn
from kernels.ops.rounding import keep, rms_norm, to_bf16
from tests.kernels.conftest import golden


@pytest.mark.oracle
def test_coefficients_and_norm() -> None:
    data = golden("units/mhc_rmsnorm")
    weights = MixWeights(torch.empty(0), data["base"], data["scale"].repeat_interleave(torch.tensor([4, 4, 16])))
    got = coefficients(data["mixes"], weights, 1e-6, 20)
    for name in ("pre", "post", "comb"):
        torch.testing.assert_close(getattr(got, name), data[name], rtol=0, atol=2e-6)
    normed = rms_norm(data["rms.x"].float(), data["rms.w"].float(), 1e-20, to_bf16)
    assert torch.equal(normed, data["rms.y"].float())


@pytest.mark.oracle
@pytest.mark.parametrize("layer", [0, 9])
def test_mix_collapse_and_expand_of_a_layer(mini: Model, layer: int) -> None:
    data = {k.removeprefix(f"layers.{layer}."): v for k, v in golden("mini/moe_mhc").items()}
    block, config = mini.blocks[layer], mini.config
    streams = data["hc_x"].float()
    parts = {}
    for part, weights in (("attn", block.attn_mix), ("ffn", block.ffn_mix)):
        parts[part] = mix(streams, weights, config.hc_eps, config.rms_norm_eps, config.hc_sinkhorn_iters)
        for name in ("pre", "post", "comb"):
            torch.testing.assert_close(getattr(parts[part], name), data[f"hc_{part}.{name}"], rtol=0, atol=1e-5)
    collapsed = collapse(streams, parts["attn"].pre, to_bf16)
    torch.testing.assert_close(collapsed, data["hc_collapsed_with_attn_pre"].float(), rtol=2**-7, atol=1e-5)
    expanded = expand(data["hc_y"].float(), streams, parts["ffn"], to_bf16)
    torch.testing.assert_close(expanded, data["hc_expanded_ffn"].float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("num", [2, 3, 4])
def test_sinkhorn_balances_rows_and_columns_for_any_number_of_streams(num: int) -> None:
    logits = torch.randn(5, num, num, generator=torch.Generator().manual_seed(num))
    comb = torch.from_numpy(sinkhorn(logits.numpy(), 1e-6, 40))
    torch.testing.assert_close(comb.sum(1), torch.ones(5, num), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(5, num), rtol=0, atol=1e-3)
    assert torch.equal(torch.cat([torch.from_numpy(sinkhorn(row[None].numpy(), 1e-6, 40)) for row in logits]), comb)


def test_sums_added_one_by_one_are_those_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(69, 4, 4, generator=torch.Generator().manual_seed(0)).numpy()
    want = sinkhorn(logits, 1e-6, 20)
    monkeypatch.setattr(mix_module, "_products_add_in_order", lambda num: False)
    monkeypatch.setattr(mix_module, "_sums", mix_module._sums.__wrapped__)
    assert (sinkhorn(logits, 1e-6, 20) == want).all()


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_streams_of_a_row_do_not_depend_on_the_others(num: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(num)
    streams, y = torch.randn(20, num, 192, generator=generator), torch.randn(20, 192, generator=generator)
    mixed = Mix(*(torch.rand(20, *shape, generator=generator) for shape in ((num,), (num,), (num, num))))
    collapsed, expanded = collapse(streams, mixed.pre, keep), expand(y, streams, mixed, keep)
    torch.set_num_threads(num_threads)
    for row in range(20):
        only = slice(row, row + 1)
        one = Mix(*(part[only] for part in mixed))
        assert torch.equal(collapse(streams[only], one.pre, keep), collapsed[only])
        assert torch.equal(expand(y[only], streams[only], one, keep), expanded[only])


@pytest.mark.parametrize("shape", [(1, 4, 128), (5, 3, 130), (64, 8, 32), (300, 4, 256)])
def test_streams_are_added_in_order_for_their_mean(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    streams = torch.randn(shape) * torch.rand(shape).exp()
    want = reduce(torch.add, streams.unbind(1)) / shape[1]
    out = torch.full((shape[0], 2, shape[2]), torch.nan)
    mean_streams_(out, [streams, -streams])
    assert torch.equal(out, torch.stack((want, -want), 1))
