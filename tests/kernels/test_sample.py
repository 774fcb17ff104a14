"""The sampler: its noise, its distribution, and that rows do not see one another."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.ops.sample import gumbel, keep_top_p, sample


def rows(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def int_rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def splitmix(z: int) -> int:
    mask = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def noise_by_hand(seed: int, position: int, token: int) -> float:
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    key = splitmix((splitmix(seed) + position * gamma) & mask)
    bits = splitmix((key + (token + 1) * gamma) & mask) >> 12
    return -math.log(-math.log((bits + 0.5) / 2**52))


def test_noise_is_the_written_down_function() -> None:
    cases = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 1_048_575), (123456789, 77)]
    noise = gumbel(int_rows(*(s for s, _ in cases)), int_rows(*(p for _, p in cases)), 50)
    for row, (seed, position) in enumerate(cases):
        for token in range(50):
            assert noise[row, token].item() == pytest.approx(noise_by_hand(seed, position, token), rel=1e-6, abs=1e-6)


def test_golden_noise() -> None:
    noise = gumbel(int_rows(7, 7, 8), int_rows(0, 1, 0), 3)
    assert noise.dtype == torch.float32
    assert [[round(x, 5) for x in row] for row in noise.tolist()] == GOLDEN


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel(torch.arange(40), torch.arange(40) * 3, 5000).double()
    # Euler's constant and pi^2 / 6, with about five standard errors of 200,000 draws.
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.015)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.06)
    assert torch.isfinite(noise).all()
    assert noise.flatten().unique().numel() > 199_000


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.5, 0.8), (1.0, 0.4)])
def test_distribution(temperature: float, top_p: float) -> None:
    num_draws, vocab_size = 20_000, 12
    logits = torch.linspace(-2, 2, vocab_size).repeat(num_draws, 1)
    draws = sample(
        logits,
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), top_p),
        torch.arange(num_draws) % 100,
        torch.arange(num_draws) // 100,
    )
    probability = torch.softmax(logits[0].double() / temperature, -1).flip(0)
    kept = (probability.cumsum(0) - probability) < top_p
    expected = (probability * kept / (probability * kept).sum()).flip(0) * num_draws
    counts = torch.bincount(draws, minlength=vocab_size).double()
    assert (counts[expected == 0] == 0).all()
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum().item()
    degrees = int(live.sum()) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-torch.inf, -1.0, -torch.inf, -1.0]])
    tokens = sample(logits, rows(0, 0, 0), rows(1, 0.5, 1), int_rows(1, 2, 3), int_rows(0, 0, 0))
    assert tokens.tolist() == [1, 0, 1]


def test_top_p_keeps_the_smallest_sufficient_set_in_order_of_id() -> None:
    scaled = torch.log(torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.1, 0.2]]))
    kept = torch.isfinite(keep_top_p(scaled, rows(0.5, 0.7)))
    assert kept.tolist() == [[True, True, False, False], [False, True, False, True]]
    assert torch.isfinite(keep_top_p(scaled, rows(1e-9, 1e-9))).sum(-1).tolist() == [1, 1]


def test_tiny_temperature_is_greedy_and_a_mask_holds() -> None:
    logits = torch.tensor([[1.0, 2.0, 9.0, 3.0]]).repeat(64, 1)
    logits[:, 2] = -torch.inf
    seeds, positions = torch.arange(64), torch.arange(64)
    assert set(sample(logits, torch.full((64,), 1e-7), torch.ones(64), seeds, positions).tolist()) == {3}
    hot = sample(logits, torch.full((64,), 2.0), torch.full((64,), 0.99), seeds, positions)
    assert 2 not in hot.tolist()
    assert len(set(hot.tolist())) > 1


def test_a_row_is_the_same_in_any_batch() -> None:
    num_rows, vocab_size = 37, 1001
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    temperature = torch.tensor([0.0, 1.0, 0.7])[torch.arange(num_rows) % 3]
    top_p = torch.tensor([1.0, 0.9, 0.3, 1.0])[torch.arange(num_rows) % 4]
    seed = torch.arange(num_rows) * 7919
    position = torch.arange(num_rows) * 13
    together = sample(logits, temperature, top_p, seed, position)
    for pick in [*([row] for row in range(num_rows)), list(range(5, 20)), list(reversed(range(num_rows)))]:
        index = torch.tensor(pick)
        alone = sample(logits[index], temperature[index], top_p[index], seed[index], position[index])
        assert torch.equal(alone, together[index])
        assert torch.equal(gumbel(seed[index], position[index], vocab_size), gumbel(seed, position, vocab_size)[index])
        kept = keep_top_p(logits[index], top_p[index])
        assert torch.equal(kept, keep_top_p(logits, top_p)[index])


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(3, 5000)
    same = sample(logits, torch.ones(3), torch.ones(3), int_rows(4, 4, 5), int_rows(9, 10, 9))
    assert len(set(same.tolist())) == 3


def test_nan_is_refused() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        sample(logits, rows(0, 0), rows(1, 1), int_rows(0, 0), int_rows(0, 0))


GOLDEN = [[1.0542, 0.18841, 1.88302], [1.1815, 2.60426, 0.50905], [-0.45279, 0.70324, 0.83446]]
