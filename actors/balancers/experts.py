"""What the experts of each group were asked for of late, and when they are to be placed anew."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.balancers.placement import Placement, plan
from schemas.experts import ExpertsUsed

WINDOW = 100
"""Reports that are looked back on; each is a few steps of the whole group (spec serving K4: a window of 100 steps)."""

FIRST = WINDOW // 4
"""Reports before the first plan of a group, and between two plans."""

Row = list[npt.NDArray[np.float64]]


class Planned(NamedTuple):
    """Where the experts of a group should be, to be told to each of its ranks: places as `PlaceExperts` wants them."""

    version: int
    places: list[bytes]


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

    _open: dict[int, dict[int, ExpertsUsed]] = field(default_factory=dict)
    _rows: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _num_since: int = 0
    _planned: Planned | None = None
    _versions: dict[int, int] = field(default_factory=dict)

    def report(self, used: ExpertsUsed) -> Planned | None:
        """Take a rank's report; a plan when it is time for one and it pays, or the last one until all ranks have it."""
        self.ranks[used.rank] = used.id
        self._versions[used.rank] = used.version
        of_step = self._open.setdefault(used.num_steps, {})
        of_step[used.rank] = used
        if len(of_step) < self.size:
            return None
        # What is missing of earlier steps was lost.
        self._open = {num_steps: found for num_steps, found in self._open.items() if num_steps > used.num_steps}
        counts = [[np.frombuffer(layer, "<u4") for layer in one.used] for one in of_step.values()]
        self._rows.append([np.sum(of_layer, axis=0, dtype=np.float64) for of_layer in zip(*counts, strict=True)])
        self._num_since += 1
        if self._planned is not None:
            if any(version < self._planned.version for version in self._versions.values()):
                return self._planned
            self._planned = None
        if self._num_since >= FIRST:
            self._num_since = 0
            self._planned = self._plan(used)
        return self._planned

    def _plan(self, used: ExpertsUsed) -> Planned | None:
        layers = list(zip(*self._rows, strict=True))
        placements, before, is_changed = [], [], False
        for rows, places in zip(layers, used.places, strict=True):
            slots = np.frombuffer(places, "<u2").reshape(self.size, -1)
            old = Placement(tuple(tuple(int(expert) for expert in row) for row in slots))
            loads = np.stack(rows)[None]
            found = plan(loads, [old], self.size, slots.size - loads.shape[2])
            placements.append(found.placements[0])
            before.append(found.before[0])
            is_changed = is_changed or found.placements[0] is not old
        self.balance = float(np.mean(before))
        if not is_changed:
            return None
        version = max(self._versions.values()) + 1
        self.num_plans += 1
        return Planned(version, [np.array(one.slots, dtype="<u2").tobytes() for one in placements])


class Groups:
    """All groups that were heard of, by role and name."""

    def __init__(self) -> None:
        self.recent: dict[tuple[str, str], Recent] = {}

    def report(self, used: ExpertsUsed) -> Planned | None:
        """Take a rank's report. Ranks that have met again begin anew."""
        key = (used.role, used.group)
        known = self.recent.get(key)
        if known is None or known.generation != used.generation:
            known = self.recent[key] = Recent(used.generation, used.size)
        return known.report(used)

    def ranks(self, used: ExpertsUsed) -> list[str]:
        """The ids of the ranks of the group that a report is from."""
        return list(self.recent[used.role, used.group].ranks.values())

    def detail(self) -> dict[str, float]:
        """For a load report: how many groups and plans, and max / mean rank load of the worst group."""
        groups = self.recent.values()
        return {
            "groups": float(len(groups)),
            "plans": float(sum(group.num_plans for group in groups)),
            "imbalance": round(max((group.balance for group in groups), default=1.0), 3),
        }
