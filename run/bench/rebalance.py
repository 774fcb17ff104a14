"""What was heard of a service whose experts were moved, and what it says of the time before, during and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from actors.balancers.experts import FIRST
from actors.balancers.placement import Placement, moves
from schemas.experts import ExpertsUsed, PlaceExperts

NUM_AFTER = FIRST + 5
"""Reports without another plan after which there will be none: the balancer has looked again."""
MAX_REPORTS = 8 * FIRST
PHASES = ("before", "during", "after")


class Answer(NamedTuple):
    """A streamed answer to request `number`, and when tokens of each of its steps came."""

    number: int
    text: str
    began_s: float
    ended_s: float
    steps_s: Sequence[float]


class Report(NamedTuple):
    """What all ranks reported of the same steps; `balance` is max / mean rank load of each layer in them."""

    began_s: float
    ended_s: float
    num_steps: int
    version: int
    places: list[Placement]
    balance: list[float]


class Move(NamedTuple):
    """A plan that was carried out: from the last report before it, which it was made of, to the first with it."""

    told_s: float
    start: Report
    end: Report


@dataclass
class Record:
    """Of one group of `size` ranks; answers may come from other threads."""

    size: int
    reports: list[Report] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    _told_s: dict[int, float] = field(default_factory=dict)
    _parts: dict[int, dict[int, ExpertsUsed]] = field(default_factory=dict)

    def report(self, at_s: float, used: ExpertsUsed) -> bool:
        """Of one rank; whether all have reported these steps now. Those that a part is missing of do not count."""
        parts = self._parts.setdefault(used.num_steps, {})
        parts[used.rank] = used
        if len(parts) < self.size:
            return False
        del self._parts[used.num_steps]
        rows = [
            np.stack([np.frombuffer(one, "<u4") for one in layer]).sum(axis=0).astype(np.float64)
            for layer in zip(*(part.used for part in parts.values()), strict=True)
        ]
        slots = [np.frombuffer(one, "<u2").reshape(self.size, -1).tolist() for one in used.places]
        places = [Placement(tuple(map(tuple, of_layer))) for of_layer in slots]
        balance = [one.balance(of_layer[None]) for one, of_layer in zip(places, rows, strict=True)]
        began_s = self.reports[-1].ended_s if self.reports else at_s
        self.reports.append(Report(began_s, at_s, used.num_steps, used.version, places, balance))
        return True

    def plan(self, at_s: float, place: PlaceExperts) -> None:
        """It is told again until it is carried out: the first time counts."""
        self._told_s.setdefault(place.version, at_s)

    @property
    def moved(self) -> list[Move]:
        """In the order of their versions."""
        found = []
        for version, told_s in sorted(self._told_s.items()):
            ends = [report for report in self.reports if report.version >= version]
            starts = [report for report in self.reports if report.ended_s <= told_s]
            if ends and starts:
                found.append(Move(told_s, starts[-1], ends[0]))
        return found

    @property
    def is_over(self) -> bool:
        """Whether something has moved and nothing will, or nothing does for long."""
        num = len(self.reports)
        if len(self._told_s) > len(moved := self.moved) or not moved:
            return num >= MAX_REPORTS
        return num - 1 - self.reports.index(moved[-1].end) >= NUM_AFTER or num >= MAX_REPORTS

    @property
    def progress(self) -> str:
        balance = f", max / mean load {np.mean(self.reports[-1].balance):.2f}" if self.reports else ""
        return f"{len(self.reports)} reports, {len(self.moved)} plans, {len(self.answers)} answers{balance}"

    def phase(self, began_s: float, ended_s: float) -> str:
        """When that was; what touches the time of a plan is "during", and between two plans it is ""."""
        moved = self.moved
        if any(began_s < move.end.ended_s and ended_s > move.start.ended_s for move in moved):
            return "during"
        if not moved or ended_s <= moved[0].start.ended_s:
            return "before"
        return "after" if began_s >= moved[-1].end.ended_s else ""


def summary(record: Record, expected: dict[int, str]) -> dict[str, Any]:
    """Plans, and of each phase loads, times of steps, and answers, of which those are `different` that are not
    `expected`: a request's first answer is expected from then on. Phases without a step are left out.

    What ranks had to do in a report during which experts moved is not known: it says where they are at its end.
    """
    balance: dict[str, list[list[float]]] = {phase: [] for phase in ("", *PHASES)}
    steps_s: dict[str, list[float]] = {phase: [] for phase in balance}
    num_answers, num_different = dict.fromkeys(balance, 0), dict.fromkeys(balance, 0)
    for report in record.reports:
        balance[record.phase(report.began_s, report.ended_s)].append(report.balance)
    for answer in sorted(record.answers, key=lambda one: one.ended_s):
        phase = record.phase(answer.began_s, answer.ended_s)
        num_answers[phase] += 1
        num_different[phase] += answer.text != expected.setdefault(answer.number, answer.text)
        for began_s, ended_s in zip(answer.steps_s, answer.steps_s[1:], strict=False):
            steps_s[record.phase(began_s, ended_s)].append(ended_s - began_s)
    phases: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        if not steps_s[phase] or not balance[phase]:
            continue
        median, p90 = np.percentile(steps_s[phase], [50, 90]) * 1e3
        first = phases.get("before", {"step_ms": median, "p90_ms": p90})
        phases[phase] = {
            "num_reports": len(balance[phase]),
            "num_steps": len(steps_s[phase]),
            "step_ms": round(float(median), 2),
            "p90_ms": round(float(p90), 2),
            "max_ms": round(1e3 * max(steps_s[phase]), 2),
            "ratio": round(float(median / first["step_ms"]), 3),
            "p90_ratio": round(float(p90 / first["p90_ms"]), 3),
            "num_answers": num_answers[phase],
            "num_different": num_different[phase],
        }
        if phase != "during":
            of_layers = np.mean(balance[phase], axis=0)
            phases[phase] |= {
                "balance": round(float(of_layers.mean()), 3),
                "worst_layer": round(float(of_layers.max()), 3),
            }
    return {"plans": [_described(move) for move in record.moved], "phases": phases}


def _described(move: Move) -> dict[str, float]:
    changed = [moves(old, new) for old, new in zip(move.start.places, move.end.places, strict=True)]
    return {
        "version": move.end.version,
        "num_experts": sum(map(len, changed)),
        "num_layers": sum(map(bool, changed)),
        "of_layers": len(changed),
        "planned_ms": round(1e3 * (move.told_s - move.start.ended_s), 1),
        "num_steps": move.end.num_steps - move.start.num_steps,
    }
