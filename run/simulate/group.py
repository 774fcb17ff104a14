"""One simulated group of ranks: what its layers are asked for, where its experts go, and how long its steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.balancers.placement import Placement, plan
from bus.ranks import REPORT_STEPS
from run.simulate.lockstep import Machine, Parts, Ranks, Sizes, layer_parts
from run.simulate.routing import Floats, Recorded
from run.simulate.traffic import WORKLOADS, Traffic, traffic


@dataclass(frozen=True)
class Group:
    """`num_layers` of a model's layers are simulated, and stand for all. `num_rows` are each rank's own in a step,
    `context` the tokens behind each, `at_least` the superfluous copies of each layer."""

    ep_size: int
    num_rows: int
    num_layers: int
    at_least: int
    context: int
    seed: int
    sizes: Sizes
    machine: Machine

    def traffic(self, workload: str, recorded: Recorded, num_reports: int, change_at: int | None) -> list[Traffic]:
        """Of each layer; the same for groups of all sizes."""
        size = (self.sizes.num_experts, self.sizes.num_picks)
        return [
            traffic(workload, recorded, layer, size, num_reports, change_at, self._rng(workload, layer))
            for layer in range(self.num_layers)
        ]

    def loads(self, workload: str, layers: Sequence[Traffic], num_rows: int) -> list[tuple[Floats, Floats]]:
        """`Traffic.loads` of each layer, with so many rows of each rank's own."""
        return [
            one.loads(num_rows * self.ep_size, REPORT_STEPS, self._rng(workload, layer, num_rows, self.ep_size))
            for layer, one in enumerate(layers)
        ]

    def first(self) -> Placement:
        """What a layer begins with."""
        return Placement.contiguous(self.sizes.num_experts, self.ep_size, self.at_least)

    def advised(self, window: Floats, old: Placement) -> Placement:
        """What the balancer makes of a layer after the loads of a window of reports, `[reports, experts]`."""
        return plan(window[None], [old], self.ep_size, self.at_least).placements[0]

    def parts(self, layers: Sequence[Ranks], num_rows: int) -> Parts:
        """A step's time, mean over steps, of all layers of the model."""
        each = [layer_parts(ranks, num_rows, self.context, self.sizes, self.machine) for ranks in layers]
        return Parts(*(np.mean(each, axis=0) * self.sizes.num_layers).tolist())

    def _rng(self, workload: str, *of: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, WORKLOADS.index(workload), *of))
