import torch

from kernels.ops.compress import pool_norm
from kernels.ops.rounding import keep


def test_a_pair_is_pooled_per_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(5, 2, 64, generator=generator) for _ in range(2))
    weight = torch.rand(64, generator=generator)
    shares = torch.softmax(torch.stack((first[:, 1], second[:, 1])), 0)
    pooled = shares[0] * first[:, 0] + shares[1] * second[:, 0]
    want = pooled * pooled.square().mean(1, keepdim=True).rsqrt() * weight
    torch.testing.assert_close(pool_norm(first, second, weight, 1e-20, keep), want)


def test_a_far_greater_score_takes_all() -> None:
    first, second = torch.ones(1, 2, 32), torch.full((1, 2, 32), 2.0)
    first[:, 1] = 200.0
    assert torch.equal(pool_norm(first, second, torch.ones(32), 0.0, keep), torch.ones(1, 32))
