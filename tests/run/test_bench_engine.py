"""The engine benchmark runs and reports what others parse. Its figures are not asserted: machines are noisy."""

from __future__ import annotations

import json

import pytest

from kernels.ops import mix
from kernels.ops.linear import linear
from run.bench import engine, operations
from run.bench.operations import timed_operations
from tests.kernels.conftest import GOLDEN


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"PREFILLS": (8, 24), "REPLAYS": (24, 40), "BATCHES": (1, 2), "CONTEXT": 5, "STEP_TOKENS": 16}
    for name, value in {**sizes, "NUM_ROUNDS": 1, "NUM_STEPS": 2, "RAW_SIZE": 64, "RAW_BYTES": 4096}.items():
        monkeypatch.setattr(engine, name, value)


def test_it_prints_one_object(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    engine.bench_engine(GOLDEN / "mini", json=True)
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    speeds = {"prefill_tok_s": {"8", "24"}, "prefill_exact_tok_s": {"8", "24"}, "decode_tok_s": {"1", "2"}}
    speeds |= {"decode_drafts_tok_s": {"1", "2"}, "decode_drafts_tok_step": {"1", "2"}}
    speeds |= {"replay_time_ratio": {"24", "40"}, "replay_flops_ratio": {"24", "40"}}
    speeds |= {"prefill_gflop_s": {"8", "24", "40"}, "decode_weight_gb_s": {"1", "2"}}
    assert set(found) == {*speeds, "raw", "ops"}
    for name, keys in speeds.items():
        assert set(found[name]) == keys and all(value > 0 for value in found[name].values()), name
    assert found["replay_flops_ratio"]["40"] < 1
    assert 1 <= found["decode_drafts_tok_step"]["1"] <= 6
    assert set(found["ops"]) == {"prefill_16", "decode_1", "decode_2"}
    for part in found["ops"].values():
        assert {"linear", "attention.attend", "mix.sinkhorn", "experts.run_experts", "other"} <= set(part)
        assert all(value >= 0 for value in part.values())
    engine._print(found)
    out = capsys.readouterr().out
    assert "with drafts" in out and "mix.sinkhorn" in out


def test_an_operation_counts_without_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_operations() as clock:
        assert mix.linear is not linear
        monkeypatch.setattr(operations.time, "perf_counter_ns", iter([0, 10, 13, 20, 27, 100]).__next__)
        inner = clock.timed("inner", lambda: None)
        clock.timed("outer", lambda: (inner(), inner()))()
    assert mix.linear is linear
    assert clock.spent_ns == {"inner": 3 + 7, "outer": 100 - 10}
