"""Wide groups on paper: sizes as published, arithmetic by hand, and the balancer's rules over time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.balancers.experts import FIRST
from actors.balancers.placement import Placement
from kernels.config import ModelConfig
from kernels.flops import decode_weights
from run.evaluate.decoding import open_model
from run.settings import SettingsError
from run.simulate import timeline as over_time
from run.simulate.experts import experts
from run.simulate.group import Group
from run.simulate.lockstep import Machine, Ranks, Sizes, layer_parts, ranks_of
from run.simulate.recording import picks
from run.simulate.routing import Recorded, alike, chances, exponent_of, gini, scaled_up, shares, zipf
from run.simulate.steady import steady
from run.simulate.timeline import timeline
from run.simulate.traffic import WORKLOADS, traffic
from run.train.rendering import Renderer
from run.train.seeds import rng as seeded
from run.train.tasks import HELD_OUT

BUNDLED = Path("run/models/shoal-tiny")
SMALL = Sizes(num_layers=4, num_experts=16, num_picks=2)


def group(ep_size: int = 4, num_rows: int = 64, **machine: float) -> Group:
    return Group(ep_size, num_rows, 2, 4 if ep_size > 1 else 0, 1024, 0, SMALL, replace(Machine(), **machine))


def test_sizes_are_those_of_the_published_model() -> None:
    config, sizes = ModelConfig.from_keys(json.loads(Path("tests/data/real_config.json").read_text())), Sizes()
    assert (sizes.num_layers, sizes.num_experts) == (config.num_hidden_layers, config.n_routed_experts)
    assert (sizes.num_picks, sizes.hidden_size) == (config.num_experts_per_tok, config.hidden_size)
    num_weights = 3 * config.hidden_size * config.moe_intermediate_size
    assert sizes.intermediate_size == config.moe_intermediate_size
    assert sizes.expert_bytes == num_weights // 2 + num_weights // 32
    assert sizes.dense_bytes == decode_weights(config, 0) + config.hidden_size * config.vocab_size
    assert sizes.cache_bytes(32_768) == pytest.approx(18.3e6, rel=0.01)


class TestRouting:
    def test_shares_and_likeness_of_requests(self) -> None:
        one, other = np.array([[0], [0], [0]]), np.array([[1], [1]])
        assert shares([one, other], 4).tolist() == [0.6, 0.4, 0.0, 0.0]
        assert alike([one, other], 4) == 1.0
        both = np.array([[0, 1], [0, 1], [0, 1]])
        assert alike([both, both], 4) == 0.0, "whose rows they are makes no difference"
        # In one request 4 of 8 pairs of rows pick the same, across the two 4 of 12.
        assert alike([np.array([[0], [0], [1]]), np.array([[1], [1]])], 2) == pytest.approx((1 / 2 - 1 / 3) / (2 / 3))
        with pytest.raises(ValueError, match="two requests"):
            alike([one], 4)

    def test_zipf_with_a_gini_coefficient(self) -> None:
        assert gini(np.array([0.0, 1.0, 0.0, 0.0])) == 0.75 and gini(np.full(5, 0.2)) == pytest.approx(0.0)
        for coefficient in (0.1, 0.5, 0.8):
            assert gini(zipf(48, exponent_of(coefficient, 48))) == pytest.approx(coefficient, abs=1e-6)

    def test_chances_add_up_to_the_picks_and_no_expert_is_picked_twice(self) -> None:
        parts = np.stack([zipf(16, 3.0), np.full(16, 1 / 16)])
        found = chances(parts, 6)
        assert found.sum(axis=1) == pytest.approx(6.0) and found.max() <= 1.0
        assert found[1] == pytest.approx(6 / 16) and (np.diff(found[0]) < 0).all()

    def test_more_experts_are_as_uneven_within_as_the_recorded_are_among_themselves(self) -> None:
        draw = np.random.default_rng(0)
        recorded = np.stack([zipf(4, 1.0), zipf(4, 1.0)[::-1]])
        found = scaled_up(recorded, 16, draw)
        assert found.sum(axis=1) == pytest.approx(1.0)
        inside = zipf(4, 1.0)
        assert np.sort(found[0]) == pytest.approx(np.sort(np.outer(inside, inside).ravel()))
        assert not np.allclose(found[0], found[1])
        same = scaled_up(np.stack([zipf(4, 1.0)] * 2), 16, draw)
        assert same[0] == pytest.approx(same[1]), "tasks that are alike stay so"
        near = scaled_up(np.stack([zipf(4, 1.0), zipf(4, 1.2)]), 400, draw)
        assert 0.9 < np.corrcoef(np.log(near))[0, 1] < 1.0, "and those that are less so a little less"
        assert scaled_up(np.full((2, 4), 0.25), 16, draw) == pytest.approx(1 / 16)
        with pytest.raises(ValueError, match="stand for"):
            scaled_up(recorded, 3, draw)

    def test_what_is_recorded_is_of_the_bundled_model(self) -> None:
        recorded, config = Recorded.read(), ModelConfig.from_folder(BUNDLED)
        found = np.array(recorded.shares)
        assert recorded.tasks == list(HELD_OUT) and recorded.num_picks == config.num_experts_per_tok
        assert found.shape == (config.num_hidden_layers, len(HELD_OUT), config.n_routed_experts)
        assert found.sum(axis=2) == pytest.approx(1.0, abs=1e-3) and found.max() <= 1 / recorded.num_picks
        assert np.array(recorded.alike).shape == found.shape[:2]

    def test_rows_that_decode_computes_are_recorded(self) -> None:
        model, example = open_model(BUNDLED), HELD_OUT["about"](seeded("held-out", "about", 0), 64)
        sample = Renderer(BUNDLED).render(example)
        found = picks(model, sample, [])
        assert len(found) == len(model.config.layers)
        for of_layer in found:
            assert of_layer.shape == (sample.targets.sum() - 1, 2), "the last token of an answer is never computed"
            assert (of_layer[:, 0] != of_layer[:, 1]).all() and of_layer.max() < 8


class TestTraffic:
    def test_loads_are_of_as_many_rows_as_there_are(self) -> None:
        for workload in WORKLOADS:
            draw = np.random.default_rng(1)
            step, report = traffic(workload, Recorded.read(), 0, (64, 6), 200, None, draw).loads(512, 4, draw)
            assert step.sum(axis=1).mean() == pytest.approx(6 * 512, rel=0.05), workload
            assert report.sum(axis=1).mean() == pytest.approx(4 * step.sum(axis=1).mean(), rel=0.02)
            assert step.max() <= 512 and (report >= step).all()

    def test_a_change_comes_when_it_is_said(self) -> None:
        for workload in WORKLOADS:
            found = traffic(workload, Recorded.read(), 0, (64, 6), 200, 100, np.random.default_rng(2)).chances
            late, early = found[100:].mean(axis=0), found[:100].mean(axis=0)
            assert np.abs(late - early).max() > 0.03, workload
            if workload != "hot":
                assert (found[:100] == found[0]).all() and (found[100:] == found[100]).all()


class TestLockstep:
    LOADS = np.array([[8.0, 2.0, 0.0], [1.0, 0.0, 5.0]])
    PLACED = Placement(((0, 1), (0, 2)))

    def test_rows_are_shared_by_copies_and_only_experts_with_rows_are_read(self) -> None:
        ranks = ranks_of(self.LOADS, self.PLACED)
        assert ranks.rows.tolist() == [[6.0, 4.0], [0.5, 5.5]]
        assert ranks.touched.tolist() == [[2.0, 1.0], [1.0, 1.0]], "one row is for the first copy"

    def test_a_step_waits_for_the_slowest_rank(self) -> None:
        machine = Machine(reached=0.5, overhead_us=7.0)
        sizes = Sizes(num_layers=1)
        few = layer_parts(Ranks(np.array([[1.0, 1.0]]), np.array([[2.0, 1.0]])), 3, 0, sizes, machine)
        assert few.experts_s == pytest.approx(2 * sizes.expert_bytes / 2.4e12), "weights of the one with most"
        assert few.exchange_s == pytest.approx(3 * 6 * 15_520 / 2 / 225e9), (
            "what a rank sends is more than what it gets"
        )
        assert few.attention_s == pytest.approx(sizes.dense_bytes / 2.4e12) and few.overhead_s == pytest.approx(7e-6)
        assert few.step_s == pytest.approx(sum(few))
        many = layer_parts(Ranks(np.array([[9000.0, 10.0]]), np.array([[1.0, 1.0]])), 3, 0, sizes, machine)
        assert many.experts_s == pytest.approx(9000 * 6 * 5120 * 2304 / 989.5e12)
        assert many.exchange_s == pytest.approx(9000 * 15_520 / 2 / 225e9)

    def test_ranks_of_other_nodes_are_behind_the_slower_link(self) -> None:
        ranks = Ranks(np.full((1, 16), 6.0), np.ones((1, 16)))
        found = layer_parts(ranks, 1, 0, Sizes(), Machine(reached=1.0))
        assert found.exchange_s == pytest.approx(6 * 15_520 / 2 / 50e9)
        alone = layer_parts(Ranks(np.full((1, 1), 6.0), np.ones((1, 1))), 1, 0, Sizes(), Machine())
        assert alone.exchange_s == 0.0


def test_wider_groups_read_less_and_are_evened_out() -> None:
    recorded = Recorded.read()
    found = {size: steady(group(size), "zipf-1", recorded, [2, 64]) for size in (1, 4)}
    assert found[4][1]["token_mb"] < found[1][1]["token_mb"] / 2
    assert found[1][0]["touched"] < 4 <= found[1][1]["touched"], "two rows pick no more than four experts"
    assert found[4][1]["balance_after"] < 1.1 < found[4][1]["balance_before"]
    assert found[4][1]["step_ms_after"] < found[4][1]["step_ms_before"]
    assert found[1][0]["memory_gb"] == pytest.approx(16 * 4 * 18_800_640 / 1e9, abs=0.01) and found[1][0]["fits"]


class TestTimeline:
    def test_plans_follow_a_load_that_changes(self) -> None:
        found = timeline(group(), "zipf-1", Recorded.read(), num_reports=200)
        assert found["settled"] < 1.1 < found["start"] and found["end"] < found["changed"]
        moved = [plan for plan in found["plans"] if plan["num_moved"]]
        assert 2 <= len(moved) < len(found["plans"]), "what is even stays"
        assert found["recovered_s"] > 0 and len(found["balance"]) == 8

    def test_a_plan_takes_its_time_and_is_paid_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = group(plan_ms=500.0, read_gb_s=0.5)
        plans = timeline(slow, "zipf-1", Recorded.read(), num_reports=150)["plans"]
        first = plans[0]
        quick = timeline(group(plan_ms=1e-6, read_gb_s=0.5), "zipf-1", Recorded.read(), num_reports=100)["plans"]
        assert first["done_s"] - first["seen_s"] == pytest.approx(4 * 0.5 + first["load_s"], abs=0.02)
        assert any(not plan["num_moved"] for plan in plans[:-1])
        for plan, then in zip(plans, plans[1:], strict=False):
            assert then["seen_s"] >= plan["done_s"] - 0.01, "no look before the last plan is carried out"
        alone = timeline(replace(slow, num_layers=1), "zipf-1", Recorded.read(), num_reports=50)["plans"][0]
        assert alone["load_s"] == pytest.approx(4 * alone["most_of_a_rank"] * 18_800_640 / 0.5e9, abs=0.01)
        assert first["moved_gb"] == pytest.approx(4 * first["num_moved"] * 18_800_640 / 1e9, abs=0.01)
        assert quick[0]["seen_s"] == first["seen_s"]
        looks: list[int] = []
        real = over_time._plan
        monkeypatch.setattr(over_time, "_plan", lambda *given: (looks.append(len(given[1][0])), real(*given))[1])
        timeline(group(plan_ms=1e-6, read_gb_s=1e6), "zipf-1", Recorded.read(), num_reports=150)
        assert looks == [FIRST, 2 * FIRST, 3 * FIRST, 4 * FIRST, 4 * FIRST, 4 * FIRST]


def test_the_command_prints_one_object_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    experts(ep="1", rows="1,2", layers=1, json=True)
    found = json.loads(capsys.readouterr().out)
    assert len(found["steady"]) == len(WORKLOADS) * 2 and found["moving"] == []
    assert found["assumed"]["hbm_tb_s"] == 4.8 and found["simulated_layers"] == 1
    for wrong in ({"ep": "8,x"}, {"rows": "0"}, {"machine": Machine(reached=1.5)}, {"layers": 0}):
        with pytest.raises(SettingsError):
            experts(**wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="twice"):
        experts(ep="2", rows="1", redundant=400)
