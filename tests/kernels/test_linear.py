import numpy as np
import pytest
import torch

from kernels.ops import linear as module
from kernels.ops.linear import (
    HEIGHTS,
    ROW_TILE,
    Fp8Weight,
    by_columns,
    cuts,
    each_linear,
    fp8_linear,
    grouped_linear,
    linear,
)
from tests.kernels.conftest import golden

SHAPES = [(24, 768), (352, 192), (8, 64), (256, 1536)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_depend_on_its_company(n: int, k: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(n)
    weight = by_columns(torch.randn(n, k, generator=generator))
    x = torch.randn(HEIGHTS[-1] + 71, k, generator=generator)
    alone = torch.cat([linear(row[None], weight) for row in x[:20]])
    torch.testing.assert_close(alone, x[:20] @ weight.T, rtol=1e-4, atol=1e-3)
    torch.set_num_threads(num_threads)
    whole = linear(x, weight)
    assert torch.equal(whole[:20], alone)
    order = torch.randperm(len(x), generator=generator)
    assert torch.equal(linear(x[order], weight), whole[order])
    for rows in (1, 2, 3, 5, 63, 64, 65, 128, 200):
        assert torch.equal(linear(x[-rows:], weight), whole[-rows:])


def test_weights_may_lie_in_rows_too() -> None:
    x, weight = torch.randn(7, 64), torch.randn(32, 64)
    assert torch.equal(linear(x, weight), linear(x, by_columns(weight)))
    assert torch.equal(by_columns(weight), weight) and by_columns(weight).stride() == (1, 32)


def test_inputs_may_lie_in_columns_too() -> None:
    x, weight = torch.randn(64, 8).T, by_columns(torch.randn(33, 64))
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))


def test_without_the_probe_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(150, 192), torch.randn(64, 192)
    assert len(module.heights(192, 64)) > 1  # else this machine never takes the quick way, which is correct too
    want = linear(x, weight)
    monkeypatch.setattr(module, "heights", lambda k, n: (ROW_TILE,))
    assert torch.equal(linear(x, weight), want)


def test_the_probe_notices_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_when_tall(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return real(x[:, ::-1].copy(), matrix[::-1].copy()) if len(x) > 64 else real(x, matrix)

    real = module._product
    monkeypatch.setattr(module, "_product", reversed_when_tall)
    assert max(module.heights.__wrapped__(192, 64)) <= 64


def test_a_library_that_fails_every_probe_gets_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_product", lambda x, matrix: np.full((len(x), matrix.shape[1]), np.nan, np.float32))
    monkeypatch.setattr(module, "heights", module.heights.__wrapped__)
    x, weight = torch.randn(2, 8, 64), torch.randn(2, 33, 64)
    assert module.heights(64, 33) == (ROW_TILE,)
    assert torch.equal(each_linear(x, weight), torch.stack([linear(x[0], weight[0]), linear(x[1], weight[1])]))
    x = x[:, :ROW_TILE]
    monkeypatch.setattr(np, "matmul", None)
    assert torch.equal(each_linear(x, weight)[1], linear(x[1], weight[1]))


def test_cuts_are_as_tall_as_is_allowed() -> None:
    assert cuts(652, (4, 8, 64, 512)) == ((0, 512), (512, 576), (576, 640), (640, 648), (648, 652))
    assert cuts(12, (4,)) == ((0, 4), (4, 8), (8, 12))


def test_groups_are_separate_products() -> None:
    x, weight = torch.randn(5, 2, 64), torch.randn(2, 32, 64)
    want = torch.cat((linear(x[:, 0].contiguous(), weight[0]), linear(x[:, 1].contiguous(), weight[1])), 1)
    assert torch.equal(grouped_linear(x, weight), want)


@pytest.mark.oracle
def test_fp8_products_in_blocks_of_k() -> None:
    data = golden("units/gemm")
    got = fp8_linear(data["x"].float(), Fp8Weight(data["fp8.weight"], data["fp8.scale"]))
    torch.testing.assert_close(got, data["fp8.y_fp32"], rtol=1e-6, atol=1e-6)
