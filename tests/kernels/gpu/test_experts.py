"""What is plain torch on a GPU gives what the CPU's way gives."""

import pytest
import torch

from kernels.ops.experts import Routes, run_experts
from kernels.ops.gpu import experts as gpu
from kernels.ops.rounding import keep


@pytest.mark.parametrize("num_picks", [1, 3])
def test_one_expert_after_another_gives_the_same(num_picks: int) -> None:
    generator = torch.Generator().manual_seed(num_picks)
    x = torch.randn(11, 64, generator=generator)
    w13, w2 = torch.randn(7, 64, 64, generator=generator), torch.randn(7, 64, 32, generator=generator)
    picked = torch.stack([torch.randperm(6, generator=generator)[:num_picks] for _ in range(11)])
    routes = Routes(picked, torch.rand(11, num_picks, generator=generator))
    want = run_experts(x, routes, w13, w2, 10.0, keep, keep)
    torch.testing.assert_close(gpu.run_experts(x, routes, w13, w2, 10.0, keep, keep), want, rtol=1e-5, atol=1e-4)
