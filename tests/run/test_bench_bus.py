"""The bus benchmark runs and reports what others parse. Its figures are not asserted: machines are noisy."""

from __future__ import annotations

import json

import pytest

from run.bench import bus


@pytest.mark.nats
def test_it_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("NUM_ROUNDS", 1), ("NUM_ASKS", 10), ("NUM_TELLS", 100)):
        monkeypatch.setattr(bus, name, value)
    bus.bench_bus(json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"ask_us", "raw_ask_us", "ask_ratio", "tell_per_s", "raw_tell_per_s", "tell_ratio"}
    assert all(value > 0 for value in found.values())
    bus.bench_bus()
    assert "ask" in capsys.readouterr().out
