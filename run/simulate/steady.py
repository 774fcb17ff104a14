"""A simulated group under a workload that stays as it is: before the experts are placed by it, and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.balancers.experts import WINDOW
from run.simulate.group import Group
from run.simulate.lockstep import Parts, ranks_of
from run.simulate.routing import Recorded


def steady(group: Group, workload: str, recorded: Recorded, rows: Sequence[int]) -> list[dict[str, Any]]:
    """For each of `rows`, a rank's own in a step: what ranks read, how even they are loaded, how long steps take.

    Experts are placed by the loads of a window of reports with `group.num_rows` rows; all else is measured on steps of
    the next so many reports.
    """
    layers = group.traffic(workload, recorded, 2 * WINDOW, None)
    old = group.first()
    window = group.loads(workload, layers, group.num_rows)
    new = [group.advised(reports[:WINDOW], old) for _, reports in window]
    slots = np.array(old.slots).shape[1]
    held_gb = slots * group.sizes.expert_bytes * group.sizes.num_layers / 1e9
    found = []
    for num_rows in rows:
        steps = [last[WINDOW:] for last, _ in group.loads(workload, layers, num_rows)]
        was = [ranks_of(loads, old) for loads in steps]
        now = [ranks_of(loads, placement) for loads, placement in zip(steps, new, strict=True)]
        before, after = group.parts(was, num_rows), group.parts(now, num_rows)
        touched = float(np.mean([ranks.touched.mean() for ranks in now]))
        read_gb = touched * group.sizes.expert_bytes / 1e9
        found.append(
            {
                "workload": workload,
                "ep": group.ep_size,
                "rows": num_rows,
                "slots": slots,
                "memory_gb": round(held_gb, 2),
                "fits": held_gb + group.sizes.dense_bytes / 1e9 < group.machine.memory_gb,
                "touched": round(touched, 2),
                "layer_mb": round(read_gb * 1e3, 1),
                "step_gb": round(read_gb * group.sizes.num_layers, 2),
                "token_mb": round(read_gb * 1e3 * group.sizes.num_layers / num_rows, 1),
                "balance_before": round(float(np.mean([old.balance(loads) for loads in steps])), 3),
                "balance_after": round(
                    float(np.mean([placement.balance(loads) for loads, placement in zip(steps, new, strict=True)])), 3
                ),
                "step_ms_before": round(before.step_s * 1e3, 3),
                "step_ms_after": round(after.step_s * 1e3, 3),
                "tokens_s_before": round(num_rows / before.step_s),
                "tokens_s_after": round(num_rows / after.step_s),
                "parts_ms": _parts_ms(after),
            }
        )
    return found


def _parts_ms(parts: Parts) -> dict[str, float]:
    return {name.removesuffix("_s"): round(value * 1e3, 3) for name, value in parts._asdict().items()}
