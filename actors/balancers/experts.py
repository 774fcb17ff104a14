"""What the experts of each group were asked for of late, and when they are to be placed anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.balancers.placement import Placement, Plan, plan
from schemas.experts import ExpertsUsed

WINDOW = 100
"""Reports that are looked back on; each is a few steps of the whole group (spec serving K4: a window of 100 steps)."""

FIRST = WINDOW // 4
"""Reports before the first plan of a group, and between two looks at it."""

Row = list[npt.NDArray[np.float64]]
"""Of a report of all ranks: for each layer, rows by expert."""


class Planned(NamedTuple):
    """Where the experts of a group should be, to be told to each of its ranks: places as `PlaceExperts` wants them."""

    version: int
    places: list[bytes]


@dataclass(frozen=True)
class Question:
    """What to look at: for each layer what its experts were asked for, and where they are."""

    rows: Sequence[Row]
    old: Sequence[Placement]

    def answer(self) -> Plan:
        """Better placements with as many copies. Takes long, and may run in another thread.

        Layer by layer: those of draft stages may have fewer experts.
        """
        plans = []
        for rows, old in zip(zip(*self.rows, strict=True), self.old, strict=True):
            slots, loads = np.array(old.slots), np.stack(rows)[None]
            plans.append(plan(loads, [old], len(slots), slots.size - loads.shape[2]))
        return Plan(
            tuple(one.placements[0] for one in plans),
            tuple(one.before[0] for one in plans),
            tuple(one.after[0] for one in plans),
        )


@dataclass
class Recent:
    """Of one group, while its ranks stay together; they report at the same steps. Between plans it only counts."""

    generation: int
    size: int
    ranks: dict[int, str] = field(default_factory=dict)
    """Their ids, as far as they were heard."""

    num_plans: int = 0
    balance: float = 1.0
    """Max / mean rank load in the window when it was looked at last, mean over the layers."""

    _num_steps: int = 0
    _reports: dict[int, ExpertsUsed] = field(default_factory=dict)
    _rows: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _num_since: int = 0
    _is_asking: bool = False
    _planned: Planned | None = None
    _versions: dict[int, int] = field(default_factory=dict)

    def report(self, used: ExpertsUsed) -> Planned | None:
        """Take a rank's report; with the last one of a step, the plan that some rank has not carried out yet."""
        self.ranks[used.rank], self._versions[used.rank] = used.id, used.version
        if used.num_steps < self._num_steps:
            return None
        if used.num_steps > self._num_steps:  # what is missing of the earlier one was lost
            self._num_steps, self._reports = used.num_steps, {}
        self._reports[used.rank] = used
        if len(self._reports) < self.size:
            return None
        counts = [[np.frombuffer(layer, "<u4") for layer in one.used] for one in self._reports.values()]
        self._rows.append([np.sum(of_layer, axis=0, dtype=np.float64) for of_layer in zip(*counts, strict=True)])
        self._num_since += 1
        if self._planned is not None and all(version >= self._planned.version for version in self._versions.values()):
            self._planned = None
        return self._planned

    def question(self, used: ExpertsUsed) -> Question | None:
        """To be answered, when it is time for a plan; then it is told `advised` what the answer was."""
        if self._planned is not None or self._is_asking or self._num_since < FIRST:
            return None
        self._num_since, self._is_asking = 0, True
        slots = [np.frombuffer(places, "<u2").reshape(self.size, -1).tolist() for places in used.places]
        return Question(list(self._rows), [Placement(tuple(map(tuple, of_layer))) for of_layer in slots])

    def advised(self, question: Question, advice: Plan, now_ns: int) -> Planned | None:
        """The plan, if it pays for some layer. Its version is above all before it, also those of another planner."""
        self._is_asking = False
        self.balance = float(np.mean(advice.before))
        if all(new is old for new, old in zip(advice.placements, question.old, strict=True)):
            return None
        self.num_plans += 1
        places = [np.array(one.slots, dtype="<u2").tobytes() for one in advice.placements]
        self._planned = Planned(max(now_ns, *(version + 1 for version in self._versions.values())), places)
        return self._planned


class Groups:
    """All groups that were heard of, by role and name."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], Recent] = {}

    def of(self, used: ExpertsUsed) -> Recent | None:
        """The group that a report is from. Ranks that have met again begin anew; None for what was before that."""
        key = (used.role, used.group)
        known = self._recent.get(key)
        if known is None or known.generation < used.generation:
            known = self._recent[key] = Recent(used.generation, used.size)
        return known if known.generation == used.generation else None

    def detail(self) -> dict[str, float]:
        """For a load report: how many groups and plans, and max / mean rank load of the worst group."""
        groups = self._recent.values()
        return {
            "groups": float(len(groups)),
            "plans": float(sum(group.num_plans for group in groups)),
            "imbalance": round(max((group.balance for group in groups), default=1.0), 3),
        }
