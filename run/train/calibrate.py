"""Temperatures for the confidence of drafts, measured on answers that the model gives (spec §8.3, STS).

They are written to the checkpoint's shoal.json, one for each place of a block, and the weights stay as training left
them: who divides what the stages say by them has all of the calibration, and one place to find it. Folding a part of
it into `confidence_head.proj` would round it to BF16, and would be folded in again whenever training goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run.evaluate.calibration import fit, write_temperatures
from run.evaluate.decoding import open_model
from run.evaluate.drafts import arrays, run_drafts
from run.evaluate.drafts_report import summary
from run.evaluate.prompts import render
from run.evaluate.questions import sampled
from run.train.tasks import TASKS

_FIRST = 500_000
"""Steps of a run take the first numbers of each million: from here on nothing is trained on."""
_LONGEST = 256


def calibrate(folder: Path, num: int, told: Callable[[int], Callable[[], None]]) -> dict[str, Any]:
    """Answer `num` prompts of each task with the model in `folder`, and write the temperatures that fit.

    `told` hears how many prompts there are, and gives what is called as each is done. Returns `summary` of the drafts,
    at these temperatures.
    """
    model = open_model(folder)
    prompts = render(folder, sampled(list(TASKS), num, "train", _FIRST))
    steps = run_drafts(model, prompts, _LONGEST, told(len(prompts)))
    temperatures = fit(*arrays(steps))
    write_temperatures(folder, temperatures)
    return summary(steps, temperatures)
