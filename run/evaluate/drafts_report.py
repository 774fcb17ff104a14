"""Figures of drafts, for each skill and for all, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from run.evaluate.calibration import Floats, errors
from run.evaluate.drafts import Step, arrays
from run.evaluate.report import new_table

ALL = "all"


def summaries(steps: Sequence[Step], temperatures: Floats | None) -> list[dict[str, Any]]:
    """What `summary` says of the steps of each skill, and in the end of all; nothing where there are no steps."""
    groups = {name: [step for step in steps if step.row == name] for name in dict.fromkeys(step.row for step in steps)}
    if steps:
        groups[ALL] = list(steps)
    return [{"skill": name, **summary(group, temperatures)} for name, group in groups.items()]


def summary(steps: Sequence[Step], temperatures: Floats | None) -> dict[str, Any]:
    """Mean accepted length with the target's own token, acceptance by place, and errors of the confidence.

    `right`: how often all drafts up to a place are; `right_then`: how often its own is, where all before it are;
    `error`: of the survival, by raw confidence; `error_calibrated`: at the checkpoint's `temperatures`, None without.
    """
    raw, num_right, num_counted = arrays(steps)
    places = range(raw.shape[1])
    num_asked = [int((num_counted > place).sum()) for place in places]
    num_reached = [int(((num_right >= place) & (num_counted > place)).sum()) for place in places]
    num_good = [int((num_right > place).sum()) for place in places]
    plain = errors(raw, num_right, num_counted, np.ones(len(places)))
    calibrated = None if temperatures is None else errors(raw, num_right, num_counted, temperatures)
    return {
        "num_steps": len(steps),
        "accepted_length": round(sum(step.num_new for step in steps) / len(steps), 3),
        "right": [_ratio(*pair) for pair in zip(num_good, num_asked, strict=True)],
        "right_then": [_ratio(*pair) for pair in zip(num_good, num_reached, strict=True)],
        "error": _with_mean(plain),
        "error_calibrated": None if calibrated is None else _with_mean(calibrated),
    }


def drafts_table(found: Sequence[dict[str, Any]], title: str) -> Table:
    """A table of what `summaries` gives; errors by place are in the JSON only, but for those of all."""
    places = [f"right {place + 1}" for place in range(len(found[0]["right"]))] if found else []
    table = new_table(title, "skill", "steps", "accepted", *places, "error %", "calibrated %")
    table.caption, table.caption_justify = "right %: all drafts up to there; error: of the confidence, by place", "left"
    for row in found:
        calibrated = row["error_calibrated"]
        table.add_row(
            row["skill"],
            f"{row['num_steps']:,}",
            f"{row['accepted_length']:.2f}",
            *("-" if one is None else f"{100 * one:.1f}" for one in row["right"]),
            f"{100 * row['error']['mean']:.1f}",
            "-" if calibrated is None else f"{100 * calibrated['mean']:.1f}",
        )
    for kind, name in (("error", "error %, by place"), ("error_calibrated", "calibrated %, by place")):
        if found and found[-1][kind] is not None:
            each = found[-1][kind]["places"]
            table.add_row(name, "", "", *(f"{100 * one:.1f}" for one in each), "", "", style="dim")
    return table


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _with_mean(found: list[float]) -> dict[str, Any]:
    return {"places": [round(one, 4) for one in found], "mean": round(sum(found) / len(found), 4)}
