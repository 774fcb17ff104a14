"""The decode benchmark runs and reports what others parse. Its figures are not asserted: machines are noisy."""

from __future__ import annotations

import json

import pytest

from run.bench import decode
from tests.kernels.conftest import GOLDEN


def test_it_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"BATCHES": (1, 2), "WARM_S": 0.001, "NUM_ANSWER": 8}.items():
        monkeypatch.setattr(decode, name, value)
    decode.bench_decode(GOLDEN / "mini", json=True, text="random", seconds=0.02)
    found = json.loads(capsys.readouterr().out)
    assert {mode: set(of) for mode, of in found.items()} == dict.fromkeys(("off", "fixed", "scheduled"), {"1", "2"})
    for mode in found:
        for one in found[mode].values():
            assert {"tok_s", "tokens_per_step", "verified_per_token", "accepted_length"} < set(one)
            assert 1 <= one["accepted_length"] <= 6
    assert found["off"]["1"]["verified_per_token"] == 1
    assert found["fixed"]["2"]["verified_per_token"] > 1
    decode._print(found, "random")
    assert "scheduled" in capsys.readouterr().out.replace("schedul…", "scheduled")
