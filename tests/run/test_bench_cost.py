"""The benchmark of costs runs and reports what others parse. Its errors are not asserted: machines are noisy."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from actors.rules.cost import Cost, Work
from actors.rules.meter import Meter
from run.bench import cost
from run.settings import DEFAULT_MODEL

TRUTH = Cost(12.4e6, 55.2e3, 12.44, 20e3, 97e3, 66.0, 1612.0, step_tokens=512.0)


def test_it_prints_one_object_and_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"NUMS_NEW": (1, 128, 600), "NUMS_CACHED": (0, 256), "NUMS_EXACT": (128,), "NUM_ROUNDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(cost, name, value)
    cost.bench_cost(DEFAULT_MODEL, json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found["residual"]) == set(found["residual_p90"]) == {"sweep", "online", "quadratic"}
    assert set(found["cost"]) == {field.name for field in fields(Cost)} and found["cost"]["step_tokens"] == 512
    assert found["sweep_s"] > 0 and found["cost"]["step_ns"] > 0
    prompts = found["prompts"]
    assert len(prompts) == 7 and all(one["took_ms"] > 0 for one in prompts)
    assert {one["num_replayed"] for one in prompts if one["num_cached"]} == {0, 128}
    assert sum(one["is_judged"] for one in prompts) == 4  # of six bounded ones three are learnt
    cost._print(found)
    assert "of tokens behind cached ones" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_is_right_is_found_to_be() -> None:
    works = [Work(new, cached, 0, cached // 128) for new in cost.NUMS_NEW for cached in cost.NUMS_CACHED]
    works += [Work(new, is_exact=True) for new in cost.NUMS_EXACT]
    timed = {
        work: cost.Took(TRUTH.block_ns * work.num_blocks, [TRUTH.ns(terms) for terms in cost._steps(work)])
        for work in works
    }
    found = cost._judged(Meter(TRUTH), timed)
    assert found["residual"]["sweep"] == 0.0 and found["residual"]["online"] < 0.01
    assert found["residual_exact"] < 0.01 and found["residual"]["quadratic"] > 0.02
    assert found["cost"]["block_ns"] == pytest.approx(TRUTH.block_ns)
