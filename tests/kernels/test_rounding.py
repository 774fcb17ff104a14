from collections.abc import Callable

import pytest
import torch

from kernels.ops import rounding


@pytest.mark.parametrize(
    ("ours", "library"),
    [
        (rounding.sigmoid, torch.sigmoid),
        (rounding.silu, torch.nn.functional.silu),
    ],
)
def test_functions_are_right_at_every_place_of_an_array(
    ours: Callable[[torch.Tensor], torch.Tensor], library: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(4099, generator=torch.Generator().manual_seed(0)) * 8
    x[:4] = torch.tensor([0.0, -100.0, 100.0, -0.0])
    whole = ours(x)
    torch.testing.assert_close(whole, library(x), rtol=1e-5, atol=1e-7)
    for offset in (1, 3, 7, 13, 31):
        assert torch.equal(ours(x[offset:]), whole[offset:])
    assert torch.equal(torch.cat([ours(one[None]) for one in x[:300]]), whole[:300])


@pytest.mark.parametrize("dim", [64, 96, 192, 1000])
def test_norm_of_a_row_does_not_depend_on_the_others(dim: int) -> None:
    x, weight = torch.randn(130, dim), torch.randn(dim)
    whole = rounding.rms_norm(x, weight, 1e-20, rounding.keep)
    alone = torch.cat([rounding.rms_norm(row[None], weight, 1e-20, rounding.keep) for row in x])
    assert torch.equal(whole, alone)
    assert torch.equal(rounding.rms_norm(torch.zeros(1, dim), weight, 1e-20, rounding.keep), torch.zeros(1, dim))
