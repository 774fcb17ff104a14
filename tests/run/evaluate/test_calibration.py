"""Errors of confidence, temperatures, intervals: against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from run.evaluate.calibration import errors, expected_error, fit, survival, temperatures_of
from run.evaluate.interval import wilson
from run.settings import SettingsError


def test_expected_error() -> None:
    said = np.array([0.95, 0.95, 0.95, 0.95, 0.25, 0.25, 1.0])
    came = np.array([True, True, True, False, False, True, True])
    # Of five in the last bin four came and 4.8 were promised; of two in the third one came and 0.5 were promised.
    assert expected_error(said, came) == pytest.approx((abs(4.8 - 4) + abs(0.5 - 1)) / 7)
    assert expected_error(np.array([]), np.array([], dtype=bool)) == 0.0


def test_survival_is_the_product_of_confidences() -> None:
    raw = np.array([[0.0, np.log(3.0)]])  # 1/2, 3/4
    assert survival(raw, np.ones(2)) == pytest.approx(np.array([[0.5, 0.375]]))
    assert survival(raw, np.array([1.0, 0.5])) == pytest.approx(np.array([[0.5, 0.45]]))


def test_what_an_end_cuts_off_does_not_count() -> None:
    raw = np.array([[20.0, 20.0], [20.0, -20.0]])  # sure of both; sure of the first, and that the second is wrong
    num_right, num_counted = np.array([1, 1]), np.array([1, 2])
    assert errors(raw, num_right, num_counted, np.ones(2)) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert errors(raw, num_right, np.array([2, 2]), np.ones(2)) == pytest.approx([0.0, 0.5], abs=1e-6)


def test_fit_finds_the_temperatures() -> None:
    """Blocks drawn with known confidences, told too boldly at the first place and too timidly at the second."""
    rng = np.random.default_rng(0)
    true = rng.normal(1.0, 1.5, (5_000, 2))
    agreed = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    num_right = np.cumprod(agreed, 1).sum(1)
    num_counted = np.full(len(true), 2)
    raw = true * [3.0, 0.5]
    before = errors(raw, num_right, num_counted, np.ones(2))
    temperatures = fit(raw, num_right, num_counted)
    after = errors(raw, num_right, num_counted, temperatures)
    assert temperatures == pytest.approx([3.0, 0.5], rel=0.2)
    assert min(before) > 0.05 and max(after) < 0.02


def test_temperatures_of_a_checkpoint(tmp_path: Path) -> None:
    assert temperatures_of(tmp_path, 2) is None
    card = tmp_path / "shoal.json"
    card.write_text('{"model": "m"}')
    assert temperatures_of(tmp_path, 2) is None
    card.write_text('{"confidence_temperatures": [1, 2.5]}')
    found = temperatures_of(tmp_path, 2)
    assert found is not None and found.tolist() == [1, 2.5]
    for wrong in ([1], [1, 0], 1, [1, "2"]):
        card.write_text(json.dumps({"confidence_temperatures": wrong}))
        with pytest.raises(SettingsError, match="2 numbers above 0"):
            temperatures_of(tmp_path, 2)


def test_wilson() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 10)[0] == 0.0
