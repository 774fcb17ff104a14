import pytest
import torch

from run.bench.gpu_case import SMALL, Case, Draw, cut_to, difference, mapped
from run.bench.gpu_cases import CASES
from tests.kernels.gpu.conftest import fresh


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_agrees_with_reference(case: Case, seed: int) -> None:
    args = case.make(Draw(SMALL, seed))
    got, want = case.kernel(fresh(args)), case.reference(fresh(args))
    assert difference(got, want) <= case.tolerance


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_alone_has_the_same_bits(case: Case) -> None:
    args = case.make(Draw(SMALL))
    alone = case.kernel(cut_to(case, args, slice(-1, None)))
    assert difference(alone, mapped(case.kernel(fresh(args)), lambda tensor: tensor[-1:])) == 0


def test_a_difference_is_seen() -> None:
    x = torch.ones(4)
    assert difference(x, x) == 0
    assert 0 < difference(x * 1.01, x) < 0.011
    assert difference(x * torch.nan, x) == float("inf")
    assert difference(x[:3], x) == float("inf")
    assert difference(x.long() + 1, x.long()) == float("inf")


def test_what_a_kernel_does_not_write_would_be_seen() -> None:
    assert difference(torch.empty(3), torch.zeros(3)) == float("inf")
    assert difference(torch.empty(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)) == float("inf")
