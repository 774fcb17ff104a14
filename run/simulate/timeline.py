"""A simulated group over time: when its experts are looked at, what moves, what it costs, what a change does."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from actors.balancers.experts import FIRST, WINDOW
from actors.balancers.placement import Placement, moves
from bus.ranks import REPORT_STEPS
from run.simulate.group import Group
from run.simulate.lockstep import ranks_of
from run.simulate.routing import Floats, Recorded

NUM_REPORTS = 400
NUM_MEASURED = 25


class Switch(NamedTuple):
    """A layer goes on with another placement, from a time on."""

    at_s: float
    layer: int
    placement: Placement


def timeline(group: Group, workload: str, recorded: Recorded, num_reports: int = NUM_REPORTS) -> dict[str, Any]:
    """The balance of a group over `num_reports` reports, by the balancer's rules, when its workload changes half way.

    It looks after `FIRST` reports, and again when the last plan is carried out and as many have come since the last
    look; at `WINDOW` of them at most. Planning takes its time. Then all ranks load what moves to them, layer after
    layer, and a layer switches when its last rank has loaded.
    """
    change_at = num_reports // 2
    layers = group.traffic(workload, recorded, num_reports, change_at)
    loads = group.loads(workload, layers, group.num_rows)
    placements = [group.first() for _ in layers]
    switches, plans, balances = list[Switch](), list[dict[str, Any]](), np.zeros(num_reports)
    clock_s, changed_s, busy_until_s, looked_at = 0.0, 0.0, 0.0, 0
    for report in range(num_reports):
        while switches and switches[0].at_s <= clock_s:
            _, layer, placements[layer] = switches.pop(0)
        if report == change_at:
            changed_s = clock_s
        steps = [last[report : report + 1] for last, _ in loads]
        pairs = list(zip(steps, placements, strict=True))
        balances[report] = np.mean([placement.balance(step) for step, placement in pairs])
        clock_s += REPORT_STEPS * group.parts([ranks_of(*pair) for pair in pairs], group.num_rows).step_s
        seen = report + 1
        if seen - looked_at >= FIRST and not switches and clock_s >= busy_until_s:
            looked_at = seen
            windows = [reports[max(0, seen - WINDOW) : seen] for _, reports in loads]
            switches, found = _plan(group, windows, placements, clock_s)
            busy_until_s = found["done_s"]
            plans.append(found)
    better_s = [plan["done_s"] - changed_s for plan in plans if plan["num_moved"] and plan["seen_s"] > changed_s]
    return {
        "workload": workload,
        "ep": group.ep_size,
        "rows": group.num_rows,
        "num_reports": num_reports,
        "took_s": round(clock_s, 1),
        "changed_s": round(changed_s, 1),
        "recovered_s": round(better_s[0], 1) if better_s else None,
        **_balances(balances, change_at),
        **_cost(group, plans, clock_s),
        "plans": [{key: round(value, 2) for key, value in plan.items()} for plan in plans],
        "balance": np.round(balances.reshape(-1, NUM_MEASURED).mean(axis=1), 3).tolist(),
    }


def _plan(
    group: Group, windows: list[Floats], placements: list[Placement], now_s: float
) -> tuple[list[Switch], dict[str, float]]:
    """What a look at the windows leads to, and what it costs, for all layers of the model."""
    scale = group.sizes.num_layers / group.num_layers
    done_s = now_s + group.sizes.num_layers * group.machine.plan_ms / 1e3
    switches, num_moved, most, load_s = list[Switch](), 0, 0, 0.0
    for layer, (window, old) in enumerate(zip(windows, placements, strict=True)):
        new = group.advised(window, old)
        by_rank = np.bincount([rank for rank, _, _ in moves(old, new)], minlength=group.ep_size)
        num_moved, most = num_moved + int(by_rank.sum()), max(most, int(by_rank.max()))
        load_s += scale * int(by_rank.max()) * group.sizes.expert_bytes / (group.machine.read_gb_s * 1e9)
        if new is not old:
            switches.append(Switch(done_s + load_s, layer, new))
    return switches, {
        "seen_s": now_s,
        "done_s": done_s + load_s,
        "load_s": load_s,
        "num_moved": num_moved / group.num_layers,
        "most_of_a_rank": most,
        "moved_gb": scale * num_moved * group.sizes.expert_bytes / 1e9,
    }


def _balances(balances: Floats, change_at: int) -> dict[str, float]:
    """Means over a few reports: the first ones, those before the change and behind it, and the last ones."""
    spans = {
        "start": balances[:NUM_MEASURED],
        "settled": balances[change_at - NUM_MEASURED : change_at],
        "changed": balances[change_at : change_at + NUM_MEASURED],
        "end": balances[-NUM_MEASURED:],
    }
    return {name: round(float(values.mean()), 3) for name, values in spans.items()}


def _cost(group: Group, plans: list[dict[str, float]], took_s: float) -> dict[str, float]:
    """Of all that moved, what part of a rank's link it took: while it loads, and in the mean."""
    link_gb_s = group.machine.link_gbit_s / 8
    moved_gb = sum(plan["moved_gb"] for plan in plans) / group.ep_size
    return {
        "link_percent_loading": round(100 * group.machine.read_gb_s / link_gb_s, 1),
        "link_percent": round(100 * moved_gb / took_s / link_gb_s, 3),
    }
