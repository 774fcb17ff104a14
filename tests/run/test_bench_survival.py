"""What thresholds of survival save and cost, counted from blocks that were verified whole."""

from __future__ import annotations

import json

import numpy as np
import pytest

from run.bench import decode, survival
from tests.kernels.conftest import GOLDEN


def test_what_a_threshold_leaves_out_is_counted() -> None:
    blocks = [(np.array([0.9, 0.5, 0.1]), 2), (np.array([0.4, 0.2]), 0), (np.array([0.3]), 1)]
    assert survival.figures(blocks, 0.0) == {"verified": 0.0, "accepted": 0.0, "verified_per_token": 9 / 6}
    found = survival.figures(blocks, 0.35)
    assert found["verified"] == pytest.approx((6 / 5) / (9 / 6) - 1)
    assert found["accepted"] == pytest.approx(5 / 6 - 1), "a draft that is left out is not accepted"


def test_it_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(decode, "NUM_ANSWER", 8)
    monkeypatch.setattr(survival, "NUM_REQUESTS", 3)
    monkeypatch.setattr(survival, "BATCH", 2)
    monkeypatch.setattr(survival, "PRICES", (0.01,))
    survival.bench_survival(GOLDEN / "mini", json=True, text="random")
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [*map(str, survival.THRESHOLDS), *(f"price {price}" for price in survival.PRICES)]
    assert found["0.0"]["verified"] == found["0.0"]["accepted"] == 0
    assert -1 < found["0.5"]["verified"] <= found["0.01"]["verified"] <= 0
