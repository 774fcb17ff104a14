"""Training draft stages: the loss of the spec, a backbone that stays as it is, and a run that goes on exactly."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from kernels.checkpoint import Checkpoint
from run.evaluate.calibration import temperatures_of, write_temperatures
from run.train import calibrate, command
from run.train.anchors import choose
from run.train.backbone import Pass
from run.train.drafts import DraftReport, DraftTrainer, losses, place_weights
from run.train.parameters import write
from run.train.plan import Plan, Rows, Stage
from run.train.state import RunFolder
from tests.run.train.models import batch, sample
from tests.untrained import untrained

PLAN = Plan((Stage("drafts", 3, {Rows(1, 128, 128): 1.0}, {"transform": 1.0}, (1.0, 1.0), select=True, rounded=True),))


def trained(trainer: DraftTrainer, num_steps: int) -> list[DraftReport]:
    until = trainer.step + num_steps
    return list(trainer.run(lambda: trainer.step + 1 >= until))


def test_losses() -> None:
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]], requires_grad=True)  # 3/4 and 1/4, 1/2 and 1/2
    confidence = torch.tensor([0.0, math.log(3)], requires_grad=True)
    found = losses(logits, confidence, torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([1, 0]))
    assert found.token.tolist() == pytest.approx([math.log(4), math.log(2)])
    assert found.distance.tolist() == pytest.approx([1.0, 0.0])
    assert found.sure.tolist() == pytest.approx([math.log(2), math.log(4 / 3)])  # accepted with 1/2, and always
    assert found.total[0].item() == pytest.approx(0.1 * math.log(4) + 0.9 + math.log(2))
    found.total.sum().backward()
    assert confidence.grad is not None and logits.grad is not None
    assert confidence.grad.tolist() == pytest.approx([0.0, -0.25])
    # Towards the second token: 0.1 (p - 1) of the cross-entropy, and the slope of the distance, 2 p (1 - p), of 0.9.
    assert logits.grad[0, 1].item() == pytest.approx(-0.1 * 0.75 - 0.9 * 2 * 0.75 * 0.25)


def test_later_places_weigh_less() -> None:
    assert place_weights(5).tolist() == pytest.approx([math.exp(-(k - 1) / 5) for k in range(1, 6)])


def test_a_run_goes_on_exactly_and_leaves_the_backbone(tmp_path: Path) -> None:
    whole = DraftTrainer(untrained(), PLAN, 5)
    before = {name: value.clone() for name, value in whole.frozen.items()}
    begun = {name: value.detach().clone() for name, value in whole.parameters.items()}
    reports = trained(whole, 3)
    assert all(torch.equal(value, whole.frozen[name]) for name, value in before.items())
    still = {name for name, value in begun.items() if torch.equal(value, whole.parameters[name])}
    assert still == {f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)}
    stopped = DraftTrainer(untrained(), PLAN, 5)
    trained(stopped, 1)
    folder = RunFolder(tmp_path, "drafts.pt", "drafts.jsonl")
    folder.save(stopped.state())
    again = DraftTrainer(untrained(), PLAN, 5)
    state = folder.load()
    assert state is not None
    again.load(state)
    assert [one.loss for one in trained(again, 2)] == [one.loss for one in reports[1:]]
    for name, value in whole.parameters.items():
        assert torch.equal(value, again.parameters[name]), name
    with pytest.raises(ValueError, match="the backbone was trained since"):
        again.load({**state, "backbone": "other"})
    # Written, all of the file but the drafts is what it was.
    shutil.copytree(untrained(), tmp_path / "model")
    write(tmp_path / "model", {**whole.frozen, **whole.parameters}, whole.config)
    raw = [(folder / "model.safetensors").read_bytes() for folder in (untrained(), tmp_path / "model")]
    assert raw[0] != raw[1]
    held, found = Checkpoint(untrained()), Checkpoint(tmp_path / "model")
    for name, entry in held._shards.entries.items():
        same = torch.equal(*(one._stored(name, entry.shape, (entry.dtype,)).view(torch.uint8) for one in (held, found)))
        assert same or name.startswith("mtp."), name


def test_a_draft_is_held_to_what_the_backbone_says_behind_the_token_before_it() -> None:
    trainer = DraftTrainer(untrained(), PLAN, 5)
    of = batch([sample(100, 1, 20), sample(20, 2, 9)], columns=128, region=64)
    anchors = choose(of, 5, 128, 100, random.Random(0))
    # Rows from which the head tells the token that they stand for.
    rows = torch.randn(trainer.config.vocab_size, trainer.config.hidden_size)
    trainer.frozen |= {"norm.weight": torch.ones(rows.shape[1]), "head.weight": rows}
    target = trainer._target(Pass(rows[of.tokens[:, 64:]]), anchors)
    assert target.argmax(-1).tolist() == anchors.tokens[:, :-1][anchors.counted].tolist()


def test_steps_with_nothing_to_draft() -> None:
    trainer = DraftTrainer(untrained(), PLAN, 5)
    empty = trainer.batch(0)
    empty.where = empty.where[:0]
    report, _ = trainer._step(empty, False)
    assert (report.loss, report.distance, report.accepted) == (0.0, 0.0, 1.0)


def test_calibration_is_read_where_drafts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(untrained(), tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(calibrate, "TASKS", {"transform": None})
    monkeypatch.setattr(calibrate, "_LONGEST", 12)
    counts: list[int] = []

    def told(num: int):  # type: ignore[no-untyped-def]
        return lambda: counts.append(num)

    found = calibrate.calibrate(tmp_path, 2, told)
    assert counts == [2, 2]
    temperatures = temperatures_of(tmp_path, 5)
    assert temperatures is not None and len(temperatures) == 5
    assert found["error_calibrated"]["places"][0] <= found["error"]["places"][0]
    assert json.loads((tmp_path / "shoal.json").read_text())["model"] == "shoal-tiny"
    write_temperatures(tmp_path, None)
    assert temperatures_of(tmp_path, 5) is None


def test_drafts_need_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # a compiler is not what is missing
    assert command.drafts(tmp_path) == 1
    assert "there is no model in" in capsys.readouterr().err and not any(tmp_path.iterdir())
