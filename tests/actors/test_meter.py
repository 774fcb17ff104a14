"""What an engine's steps take, followed: from the start-up sweep on, whatever comes then, and however fast it is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.prefill.sweep import sweep
from actors.rules.cost import PUBLISHED, Cost, Terms, Work, chunk_terms
from actors.rules.meter import Meter

TRUTH = Cost(12.4e6, 55.2e3, 12.44, 0.0, 97e3, 66.0, 1612.0, step_tokens=512.0)
"""As measured of the bundled model on one core."""

WORKS = [Work(num_new, num_cached) for num_new in (1, 100, 512, 2000, 4096) for num_cached in (0, 1024, 4096)]
LONG = Work(4096, 4096)


def test_the_sweep_is_short_and_fits_the_engine() -> None:
    assert sum(prompt.num_tokens for prompt in sweep(8192, 1 << 20)) <= 3072
    for max_step_tokens, max_tokens in ((512, 8192), (512, 1024), (128, 300), (7, 40), (1, 1)):
        prompts = sweep(max_step_tokens, max_tokens)
        assert all(prompt.num_tokens <= max_tokens for prompt in prompts)
        assert all(0 < chunk <= max_step_tokens for prompt in prompts for chunk in prompt.chunks)
        for prompt in prompts:
            assert sum(terms.tokens for terms in prompt.terms()) == prompt.num_tokens
            assert sum(terms.tail_tokens for terms in prompt.terms()) == min(prompt.num_tokens, 128)


def test_what_was_given_counts_until_there_is_enough() -> None:
    meter = Meter(TRUTH)
    for _ in range(7):
        meter.add(Work(100).terms(), 1e12)
    assert meter.cost == TRUTH and meter.residual > 0.9
    meter.add(Work(100).terms(), 1e12)
    assert meter.residual == 0.0
    assert meter.cost.ns(Work(100).terms()) == pytest.approx(1e12, rel=0.01)


def test_the_sweep_is_enough_for_prompts_of_all_sizes() -> None:
    meter = _swept()
    for work in WORKS:
        assert meter.cost.work_ns(work) == pytest.approx(TRUTH.work_ns(work), rel=0.15), work
    assert meter.cost.step_tokens == 512
    assert meter.residual < 0.5  # what was believed before is not counted


@given(st.floats(0.4, 2.5), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_another_speed_is_followed_also_of_what_does_not_come_now(speed: float, seed: int) -> None:
    """Only short prompts come, for long. The engine's speed then changes, and within 64 of them all is known again."""
    meter, draw = _swept(seed), np.random.default_rng(seed)
    _feed(meter, (chunk_terms(int(num), 0) for num in draw.integers(1, 100, 200)), draw)
    assert meter.cost.work_ns(LONG) == pytest.approx(TRUTH.work_ns(LONG), rel=0.25)
    _feed(meter, (chunk_terms(int(num), 0) for num in draw.integers(1, 100, 64)), draw, speed)
    assert meter.residual < 0.6
    short = Work(50)
    assert meter.cost.work_ns(short) == pytest.approx(speed * TRUTH.work_ns(short), rel=0.12)
    # A change that is no more than errors of the model are moves what came only.
    is_clear = not 0.75 < speed < 1.35
    assert meter.cost.work_ns(LONG) == pytest.approx(speed * TRUTH.work_ns(LONG), rel=0.3 if is_clear else 0.5)


def test_one_wild_step_moves_nothing() -> None:
    draw = np.random.default_rng(3)
    meter, same = _swept(), _swept()
    steps = [chunk_terms(int(num), 0) for num in draw.integers(1, 512, 100)]
    for number, terms in enumerate(steps):
        took_ns = TRUTH.ns(terms) * draw.normal(1, 0.02)
        same.add(terms, took_ns)
        meter.add(terms, took_ns * 30 if number == 40 else took_ns)
    for work in WORKS:
        assert meter.cost.work_ns(work) == pytest.approx(same.cost.work_ns(work), rel=0.05)


def test_the_residual_is_of_what_was_foretold() -> None:
    """A cost fitted to a step as it came would have none."""
    meter = Meter(PUBLISHED)
    assert meter.residual == 0.0
    for factor in (2.0, 4.0, 2.0):
        meter.add(Work(1000).terms(), factor * PUBLISHED.ns(Work(1000).terms()))
    assert meter.residual == pytest.approx(0.5)
    draw = np.random.default_rng(4)
    meter = _swept()
    _feed(meter, [chunk_terms(300, 0)] * 200, draw, noise=0.1)
    assert meter.residual == pytest.approx(0.067, abs=0.03)  # the median of |N(0, 0.1)|


def test_loading_is_no_step() -> None:
    """Nanoseconds a block come from long loads; one that hung is left out, and steps are not touched."""
    meter = Meter(TRUTH)
    meter.add(Terms(steps=0, blocks=0), 5e6)
    for num_blocks in (1, 32, 1, 1, 100, 60):
        meter.add(Terms(steps=0, blocks=num_blocks), 400e3 + 13e3 * num_blocks)
    meter.add(Terms(steps=0, blocks=20), 3e9)
    assert meter.cost.block_ns == pytest.approx(17e3, rel=0.2)
    assert meter.residual == 0.0 and meter.cost.token_ns == TRUTH.token_ns
    for _ in range(40):
        meter.add(Work(100).terms(), TRUTH.ns(Work(100).terms()))
    assert meter.cost.block_ns == pytest.approx(17e3, rel=0.2)


def test_an_engine_that_takes_no_time_is_no_trouble() -> None:
    meter = Meter()
    for number in range(50):
        meter.add(Work(1 + number).terms(), 0)
    assert meter.cost.most_tokens(1e6, 0) >= 1000


def _swept(seed: int = 0) -> Meter:
    meter, draw = Meter(Cost(1.0, 1.0, 1.0, 1.0, step_tokens=TRUTH.step_tokens)), np.random.default_rng(seed)
    for prompt in sweep(512, 8192):
        _feed(meter, prompt.terms(), draw)
    return meter


def _feed(
    meter: Meter, steps: Iterable[Terms], draw: np.random.Generator, slowness: float = 1.0, noise: float = 0.02
) -> None:
    for terms in steps:
        meter.add(terms, TRUTH.ns(terms) * slowness * draw.normal(1, noise))
