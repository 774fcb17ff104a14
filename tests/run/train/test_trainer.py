"""A run: its batches and steps follow from plan and seed, and it goes on exactly where it stopped."""

from __future__ import annotations

import functools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from run.train.plan import Plan, Rows, Stage, fill
from run.train.state import RunFolder
from run.train.trainer import Report, Trainer
from tests.run.train.models import sample
from tests.untrained import untrained

TASKS = {"transform": 1.0, "about": 1.0}
PLAN = Plan(
    (
        Stage("first", 2, {Rows(1, 128, 128): 1.0}, TASKS, (0.5, 1.0)),
        Stage("last", 2, {Rows(1, 384, 128): 1.0}, TASKS, (1.0, 0.5), select=True, rounded=True),
    )
)


def trained(trainer: Trainer, num_steps: int) -> list[Report]:
    until = trainer.step + num_steps
    return list(trainer.run(lambda: trainer.step + 1 >= until))


def test_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    whole = Trainer(untrained(), PLAN, 5)
    reports = trained(whole, 3)
    assert [(one.step, one.stage) for one in reports] == [(0, "first"), (1, "first"), (2, "last")]
    begun = Trainer(untrained(), PLAN, 5)
    trained(begun, 1)
    folder = RunFolder(tmp_path)
    folder.save(begun.state())
    again = Trainer(untrained(), PLAN, 5)
    state = folder.load()
    assert state is not None
    again.load(state)
    rest = trained(again, 2)
    assert [one.loss for one in rest] == [one.loss for one in reports[1:]]
    for name, value in whole.parameters.items():
        assert torch.equal(value, again.parameters[name]), name


def test_two_processes_do_what_one_does() -> None:
    """Each has half of the rows; only one of them has an image, and the other no gradients of the tower."""
    plan = Plan((Stage("", 1, {Rows(2, 128, 128): 1.0}, {"picture": 1.0, "about": 5.0}, (1.0, 1.0), guide=1.0),))
    alone, *both = (Trainer(untrained(), plan, 4) for _ in range(3))
    for trainer in (alone, *both):
        trainer.parameters["head.weight"].data.copy_(trainer.parameters["embed.weight"])  # it begins with zeros
    meet, given = Barrier(2, timeout=20), [torch.empty(0)] * 2

    def add_up(rank: int, values: list[torch.Tensor]) -> None:
        given[rank] = torch.cat([value.flatten() for value in values])
        meet.wait()
        total = given[0] + given[1]
        meet.wait()
        for value, part in zip(values, total.split([value.numel() for value in values]), strict=True):
            value.copy_(part.view_as(value))

    for rank, trainer in enumerate(both):
        trainer.rank, trainer.world = rank, 2
        trainer._add_up = functools.partial(add_up, rank)  # type: ignore[method-assign]
    batches = [trainer.batch(0) for trainer in both]
    assert torch.equal(torch.cat([one.tokens for one in batches]), alone.batch(0).tokens)
    assert sorted(bool(one.images) for one in batches) == [False, True]
    with ThreadPoolExecutor(2) as threads:
        first, second = (report for (report,) in threads.map(lambda trainer: trained(trainer, 1), both))
    (report,) = trained(alone, 1)
    assert first[:-1] == second[:-1]
    assert first.loss == pytest.approx(report.loss, rel=1e-3)
    assert (first.right, first.num_tokens) == (report.right, report.num_tokens)
    assert all(torch.equal(value, both[1].parameters[name]) for name, value in both[0].parameters.items())


def test_a_state_of_another_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed 5, not 6"):
        Trainer(untrained(), PLAN, 6).load({"seed": 5})


def test_a_state_of_another_model_is_refused() -> None:
    trainer = Trainer(untrained(), PLAN, 5)
    state = trainer.state()
    for parameters in (
        {name: value for name, value in state["parameters"].items() if name != "norm.weight"},
        state["parameters"] | {"norm.weight": torch.ones(1)},
    ):
        with pytest.raises(ValueError, match="a model of other shapes"):
            trainer.load({**state, "parameters": parameters})


def test_experts_that_were_picked_too_seldom_are_preferred() -> None:
    trainer = Trainer(untrained(), PLAN, 1)
    biases = [trainer.parameters[f"layers.0.ffn.gate.{name}"] for name in ("bias", "bias_vl")]
    before = [bias.clone() for bias in biases]
    trainer._balance({0: torch.tensor([[9.0, 1, 5, 5, 5, 5, 5, 5], [0.0] * 8])})
    assert torch.equal(biases[1], before[1]), "there was no image"
    trainer._balance({0: torch.tensor([[0.0] * 8, [1.0, 9, 5, 5, 5, 5, 5, 5]])})
    text, drawn = (bias - old for bias, old in zip(biases, before, strict=True))
    assert text[0] < 0 < text[1] and drawn[1] < 0 < drawn[0]
    assert abs(float(text.sum())) < 1e-6


def test_the_plan_says_what_a_step_does() -> None:
    stage, rate = PLAN.at(1)
    assert stage.name == "first" and rate == 0.75
    assert PLAN.at(2)[0].name == "last" and PLAN.at(3)[1] == 0.75
    with pytest.raises(ValueError, match="ends after 4 steps"):
        PLAN.at(4)


def test_processes_share_the_rows_of_every_batch_alike() -> None:
    def plan(*nums: int) -> Plan:
        return Plan(tuple(Stage("", 1, {Rows(num, 128, 128): 1.0}, TASKS, (1, 1)) for num in nums))

    assert plan(16, 4, 6).shares == [1, 2] and plan(12, 4).shares == [1, 2, 4] and PLAN.shares == [1]


def test_rows_are_filled_by_what_fits() -> None:
    made: list[tuple[str, int]] = []

    def make(task: str, number: int, num_tokens: int):  # type: ignore[no-untyped-def]
        made.append((task, number))
        return sample(100 if task == "transform" else num_tokens)

    tasks = {"transform": 1.0}
    rows, found = fill(Stage("", 1, {Rows(2, 256, 256): 1.0}, tasks, (1, 1)), random.Random(1), 1000, make)
    assert [[len(one.tokens) for one in row] for row in found] == [[100, 100], [100, 100]]
    assert len({number for _, number in made}) == len(made)
    rows, found = fill(Stage("", 1, {Rows(1, 1024, 256): 1.0}, tasks, (1, 1)), random.Random(1), 0, make)
    assert made[-1][0] == "recall" and [len(row) for row in found] == [1] and len(found[0][0].tokens) > 600


def test_the_log_forgets_what_the_state_does_not_know(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (19, 39):
        one, other = (Report(step, "first", *figures, 0.1, 0.0, 100, 1.0) for figures in ((2.0, 0.5), (1.0, 0.7)))
        folder.log([one, other])
    folder.truncate_log(20)
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert '"step": 20' in line and '"loss": 1.5' in line and '"right": 0.6' in line
