from typing import Any

import pytest
import torch

from kernels.ops.attention import Keys
from kernels.ops.index import Cache
from run.bench.gpu_case import SMALL, Case, Draw, difference, mapped
from run.bench.gpu_cases import CASES
from tests.kernels.gpu.conftest import fresh

SEEDS = [0, 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_agrees_with_reference(case: Case, seed: int) -> None:
    args = case.make(Draw(SMALL, seed))
    got, want = case.kernel(fresh(args)), case.reference(fresh(args))
    assert difference(got, want) <= case.tolerance


@pytest.mark.parametrize("case", [case for case in CASES if case.by_row], ids=lambda case: case.name)
def test_a_row_alone_has_the_same_bits(case: Case) -> None:
    args = case.make(Draw(SMALL))
    whole = case.kernel(fresh(args))

    def one(value: Any) -> Any:
        if isinstance(value, Keys):
            return value._replace(named=one(value.named))
        if isinstance(value, Cache):
            return value._replace(slots=one(value.slots))
        return mapped(value, lambda tensor: tensor[-1:].clone())

    alone = tuple(one(arg) if number in case.by_row else arg for number, arg in enumerate(fresh(args)))
    assert difference(case.kernel(alone), one(whole)) == 0


def test_a_difference_is_seen() -> None:
    x = torch.ones(4)
    assert difference(x, x) == 0
    assert 0 < difference(x * 1.01, x) < 0.011
    assert difference(x * torch.nan, x) == float("inf")
    assert difference(x[:3], x) == float("inf")
