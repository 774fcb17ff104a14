"""The cost of prefill: the published measurements, what is counted, and a fit that outliers do not spoil."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rules.cost import PUBLISHED, WINDOW, Cost, Work, chunk_terms, fit

MEASURED_MS = {4096: 245, 8192: 452, 16384: 894, 32768: 1769, 65536: 3618, 131072: 7740, 260000: 17796}
"""Time to first token of the real model (spec serving.md §3, K4)."""


def test_the_published_coefficients_fit_the_published_measurements() -> None:
    for num_tokens, took_ms in MEASURED_MS.items():
        assert PUBLISHED.ns(Work(num_tokens).terms()) == pytest.approx(took_ms * 1e6, rel=0.015)
    found = fit([(Work(num).terms(), took_ms * 1_000_000) for num, took_ms in MEASURED_MS.items()])
    for num_tokens, took_ms in MEASURED_MS.items():
        assert found.ns(Work(num_tokens).terms()) == pytest.approx(took_ms * 1e6, rel=0.015)
    assert found.block_ns == 0.0


def test_pairs_are_those_that_are_looked_at() -> None:
    """By counting: each token computed sees all before it, and itself by half."""
    for num_new, num_cached, num_replayed in ((100, 0, 0), (100, 400, 0), (100, 400, 128)):
        first = num_cached - num_replayed
        seen = sum(position + 0.5 for position in range(first, num_cached + num_new))
        assert Work(num_new, num_cached, num_replayed).terms().pairs == seen


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize(("num_new", "num_cached", "num_replayed"), [(1, 0, 0), (640, 0, 0), (513, 256, 128)])
def test_a_prompt_of_many_steps_is_the_sum_of_them(
    num_new: int, num_cached: int, num_replayed: int, is_exact: bool
) -> None:
    """The last window may be cut, too: those of its tokens in the step before the last count there."""
    work = Work(num_new, num_cached, num_replayed, 7, is_exact)
    done, end = num_cached - num_replayed, num_cached + num_new
    steps = []
    while done < end:
        num_tokens = min(256, end - done)
        steps.append(chunk_terms(num_tokens, done, end - done - num_tokens, is_exact=is_exact))
        done += num_tokens
    total = [sum(column) for column in zip(*steps, strict=True)]
    assert work.terms(256)._replace(blocks=0) == tuple(total)
    cost = Cost(1e6, 5e4, 0.1, 3e3, 2e4, 0.3, 7.0, step_tokens=256.0)
    assert cost.work_ns(work) == pytest.approx(sum(map(cost.ns, steps)) + 7 * 3e3)
    assert cost.ns(work.terms()) < cost.work_ns(work) or len(steps) == 1


def test_an_engine_that_takes_no_time_has_no_limit() -> None:
    assert Cost(1.0, 0.0, 0.0, 0.0).most_tokens(1.0, 5) > 1 << 40


def test_a_hit_costs_a_fraction() -> None:
    """64 k tokens with 95 % hit: about a fifteenth (spec serving.md §3, K4)."""
    whole, hit = PUBLISHED.ns(Work(65536).terms()), PUBLISHED.ns(Work(3277, 62259).terms())
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
        Work(int(num_new), int(num_cached), 0, int(num_cached) // 128).terms()
        for num_new, num_cached in zip(draw.integers(1, 50_000, 30), draw.integers(0, 200_000, 30), strict=True)
    ]
    found = fit([(work, truth.ns(work)) for work in works])
    for work in works:
        assert found.ns(work) == pytest.approx(truth.ns(work), rel=0.02)


def test_outliers_are_left_out() -> None:
    draw = np.random.default_rng(1)
    works = [Work(int(draw.integers(1, 20_000)), int(draw.integers(0, 100_000))).terms() for _ in range(60)]
    samples = [(work, PUBLISHED.ns(work) * draw.normal(1, 0.02)) for work in works]
    for number in range(0, 60, 10):
        samples[number] = (samples[number][0], samples[number][1] * 9)
    found = fit(samples)
    for work in works:
        assert found.ns(work) == pytest.approx(PUBLISHED.ns(work), rel=0.1)


def test_nothing_is_negative_and_little_is_enough() -> None:
    found = fit([(Work(100).terms(), 1_000_000)])
    assert found.ns(Work(100).terms()) == pytest.approx(1_000_000, rel=0.01)
    longer_is_faster = [(Work(100).terms(), 5_000_000), (Work(1000).terms(), 1_000_000)]
    found = fit(longer_is_faster)
    assert min(found.step_ns, found.token_ns, found.pair_ns, found.block_ns) >= 0
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([])


@given(st.floats(0, 1e9), st.integers(0, 1_000_000), st.floats(0, 1), st.floats(0, 1e3))
def test_the_most_that_fits_fits_and_no_more(room_ns: float, num_done: int, pair_ns: float, context_ns: float) -> None:
    cost = Cost(1e6, 5e4, pair_ns, 0.0, context_ns=context_ns)

    def added(num_tokens: int) -> float:
        return cost.ns(chunk_terms(num_tokens, num_done, WINDOW)) - cost.step_ns

    most = cost.most_tokens(room_ns, num_done)
    assert most == 0 or added(most) <= room_ns * (1 + 1e-6)
    assert added(most + 1) > room_ns * (1 - 1e-6)
