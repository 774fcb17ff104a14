"""Which experts of a layer a group's rows ask for, report by report: recorded tasks scaled up, and skews made up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from run.simulate.routing import Floats, Recorded, chances, scaled_up, zipf

WORKLOADS = ("recorded", "zipf-0.5", "zipf-1", "hot")
"""The recorded tasks, all alike often; Zipf's shares; Zipf 0.5 and on top one of 16 experts that has a tenth of all
picks, another one in each report."""

ANSWER_STEPS = 256
"""Steps that a request stays for, in the mean."""

NUM_HOT = 16
HOT_PART = 0.1
CHANGED = 0.2
"""Of the experts of a Zipf, how many change places with each other when the workload changes."""


@dataclass(frozen=True)
class Traffic:
    """Of one layer: `chances [reports, experts]` that a row picks an expert, and `spread [reports, experts]`, the
    variance of that between requests, each of which keeps its own while it lasts."""

    chances: Floats
    spread: Floats

    def loads(self, num_rows: int, num_steps: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Rows for each expert, `[reports, experts]`, with `num_rows` rows in each step: of the last step before each
        report, and of all its `num_steps` steps.

        Each row asks for an expert by chance, at most once in a step; how many experts it asks for in all is right in
        the mean only.
        """
        keep = np.exp(-num_steps / ANSWER_STEPS)
        own = rng.standard_normal(self.chances.shape)
        for report in range(1, len(own)):  # which requests are there changes slowly
            own[report] = keep * own[report - 1] + np.sqrt(1 - keep**2) * own[report]
        found = np.clip(self.chances + own * np.sqrt(self.spread / num_rows), 0.0, 1.0)
        step = rng.binomial(num_rows, found)
        return step.astype(np.float64), (step + rng.binomial(num_rows * (num_steps - 1), found)).astype(np.float64)


def traffic(
    workload: str,
    recorded: Recorded,
    layer: int,
    size: tuple[int, int],
    num_reports: int,
    change_at: int | None,
    rng: np.random.Generator,
) -> Traffic:
    """A layer's traffic of a workload, with `size` (experts, picks of a row), for `num_reports` reports.

    From report `change_at` on it is another: requests are of the second half of the tasks and were of the first; a
    fifth of the experts have changed places; others are hot. The recorded layers are taken in turn. KeyError for a
    workload that is none of `WORKLOADS`.
    """
    num_experts, num_picks = size
    late = np.arange(num_reports) >= (num_reports if change_at is None else change_at)
    if workload == "recorded":
        num_tasks, layer = len(recorded.tasks), layer % len(recorded.shares)
        is_second = np.arange(num_tasks) >= num_tasks // 2
        mix = np.ones((num_reports, num_tasks)) if change_at is None else is_second == late[:, None]
        return _of_tasks(recorded, layer, size, mix / mix.sum(axis=1, keepdims=True), rng)
    parts = zipf(num_experts, {"zipf-0.5": 0.5, "zipf-1": 1.0, "hot": 0.5}[workload])[rng.permutation(num_experts)]
    if workload == "hot":
        hot = rng.permutation(num_experts)[: 2 * NUM_HOT].reshape(2, NUM_HOT)
        whose = hot[late.astype(np.int64), rng.integers(NUM_HOT, size=num_reports)]
        found = np.repeat((1 - HOT_PART) * chances(parts, num_picks)[None], num_reports, axis=0)
        found[range(num_reports), whose] += HOT_PART * num_picks
        return Traffic(found, np.zeros_like(found))
    moved = rng.permutation(num_experts)[: round(num_experts * CHANGED)]
    other = parts.copy()
    other[moved] = parts[np.roll(moved, 1)]
    found = np.where(late[:, None], chances(other, num_picks), chances(parts, num_picks))
    return Traffic(found, np.zeros_like(found))


def _of_tasks(recorded: Recorded, layer: int, size: tuple[int, int], mix: Floats, rng: np.random.Generator) -> Traffic:
    """Of a layer with requests of all tasks, in the shares `mix [reports, tasks]`."""
    of_tasks = chances(scaled_up(np.array(recorded.shares[layer]), size[0], rng), size[1])
    mean = mix @ of_tasks
    own = of_tasks * (1 - of_tasks) * np.array(recorded.alike[layer])[:, None]
    return Traffic(mean, mix @ (of_tasks**2 + own) - mean**2)
