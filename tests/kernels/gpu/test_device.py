"""What the pretended device must not let pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.gpu.device import CUDA, PretendCuda, is_marked


def test_marks_follow_values_and_end_where_they_are_moved() -> None:
    with PretendCuda():
        here, there = torch.ones(3, 4), torch.ones(3, 4, device="cuda")
        assert there.is_cuda and there.device == CUDA and not here.is_cuda
        views = [there[0], there.view(-1), there.t(), there + 1.0, there * torch.tensor(2.0), there.topk(2).values]
        assert all(map(is_marked, [*views, *there.split(2, 1), torch.empty_like(there), torch.cat((there, there))]))
        assert is_marked(here.to("cuda")) and is_marked(torch.zeros(2, device=there.device))
        assert not is_marked(there.cpu()) and not is_marked(here.to(torch.float64))
        here.copy_(there)
        assert not is_marked(here) and here.numpy().sum() == 12
    assert not torch.ones(1).is_cuda


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: there.mul_(here),
        lambda here, there: torch.cat((here, there)),
        lambda here, there: there[here.long()],
        lambda here, there: there.index_select(0, here[0].long()),
        lambda here, there: torch.where(there > 0, here, 0.0),
        lambda here, there: there.numpy(),
    ],
)
def test_mixing_is_refused(mixed: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    with PretendCuda(), pytest.raises(AssertionError):
        mixed(torch.ones(2, 2), torch.ones(2, 2, device="cuda"))
