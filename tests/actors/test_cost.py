"""The cost of prefill: the published measurements, what is counted, and a fit that outliers do not spoil."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rules.cost import PUBLISHED, Cost, Work, fit

MEASURED_MS = {4096: 245, 8192: 452, 16384: 894, 32768: 1769, 65536: 3618, 131072: 7740, 260000: 17796}
"""Time to first token of the real model (spec serving.md §3, K4)."""


def test_the_published_coefficients_fit_the_published_measurements() -> None:
    for num_tokens, took_ms in MEASURED_MS.items():
        assert PUBLISHED.ns(Work(num_tokens)) == pytest.approx(took_ms * 1e6, rel=0.015)
    found, residual = fit([(Work(num), took_ms * 1_000_000) for num, took_ms in MEASURED_MS.items()])
    assert found.request_ns == pytest.approx(PUBLISHED.request_ns, rel=0.02)
    assert found.token_ns == pytest.approx(PUBLISHED.token_ns, rel=0.01)
    assert found.pair_ns == pytest.approx(PUBLISHED.pair_ns, rel=0.02)
    assert found.block_ns == 0.0 and residual < 0.01


def test_pairs_are_those_that_are_looked_at() -> None:
    """By counting: each token computed sees all before it, and itself by half."""
    for num_new, num_cached, num_replayed in ((100, 0, 0), (100, 400, 0), (100, 400, 128)):
        first = num_cached - num_replayed
        seen = sum(position + 0.5 for position in range(first, num_cached + num_new))
        assert Work(num_new, num_cached, num_replayed).terms()[2] == seen


def test_a_hit_costs_a_fraction() -> None:
    """64 k tokens with 95 % hit: about a fifteenth (spec serving.md §3, K4)."""
    whole, hit = PUBLISHED.ns(Work(65536)), PUBLISHED.ns(Work(3277, 62259))
    assert 13 < whole / hit < 17


@given(
    st.tuples(st.floats(0, 1e8), st.floats(1e2, 1e6), st.floats(0, 1.0), st.floats(0, 1e6)),
    st.integers(0, 2**32 - 1),
)
def test_what_was_made_of_coefficients_gives_their_times_again(
    coefficients: tuple[float, float, float, float], seed: int
) -> None:
    truth, draw = Cost(*coefficients), np.random.default_rng(seed)
    works = [
        Work(int(num_new), int(num_cached), 0, int(num_cached) // 128)
        for num_new, num_cached in zip(draw.integers(1, 50_000, 30), draw.integers(0, 200_000, 30), strict=True)
    ]
    found, residual = fit([(work, truth.ns(work)) for work in works])
    assert residual < 1e-3
    for work in works:
        assert found.ns(work) == pytest.approx(truth.ns(work), rel=0.02)


def test_outliers_are_left_out() -> None:
    draw = np.random.default_rng(1)
    works = [Work(int(draw.integers(1, 20_000)), int(draw.integers(0, 100_000))) for _ in range(60)]
    samples = [(work, round(PUBLISHED.ns(work) * draw.normal(1, 0.02))) for work in works]
    for number in range(0, 60, 10):
        samples[number] = (samples[number][0], samples[number][1] * 9)
    found, residual = fit(samples)
    assert residual < 0.05
    for work in works:
        assert found.ns(work) == pytest.approx(PUBLISHED.ns(work), rel=0.1)


def test_nothing_is_negative_and_little_is_enough() -> None:
    found, _ = fit([(Work(100), 1_000_000)])
    assert found.ns(Work(100)) == pytest.approx(1_000_000, rel=0.01)
    found, _ = fit([(Work(100), 5_000_000), (Work(1000), 1_000_000)])  # the longer the faster: no model of this
    assert min(found.request_ns, found.token_ns, found.pair_ns, found.block_ns) >= 0
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([])
