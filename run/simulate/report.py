"""What a simulation found, as numbers and as a table: the same keys for `--json` and for the plots' titles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from run.simulate.options import Outcome, Result

PARTS = (50, 90, 99)

Percentiles = dict[str, float | None]


def report(results: Mapping[str, Result], wall_s: float) -> dict[str, Any]:
    """`{"policies": {name: ...}, "requests", "wall_s"}`. Percentiles are of the requests that were answered, None where
    there is no such request; `wall_s` is how long all of it took.
    """
    num = max((len(result.outcomes) for result in results.values()), default=0)
    policies = {name: _policy(result) for name, result in results.items()}
    return {"policies": policies, "requests": num, "wall_s": round(wall_s, 2)}


def ttft_s(outcomes: Sequence[Outcome]) -> list[float]:
    """Seconds from arrival to first token, of those that were answered."""
    return [one.ttft_s for one in outcomes if one.failed is None]


def slowdown(outcomes: Sequence[Outcome]) -> list[float]:
    """How many times longer they took to their first tokens than alone."""
    return [one.ttft_s / one.unloaded_s for one in outcomes if one.failed is None]


def queue_age_s(outcome: Outcome) -> float:
    """How long it waited for others: what its first token took beyond what it takes alone."""
    return max(0.0, outcome.ttft_s - outcome.unloaded_s)


def _policy(result: Result) -> dict[str, Any]:
    answered = [one for one in result.outcomes if one.failed is None]
    num_prompt = sum(one.num_prompt for one in answered)
    return {
        "ttft_ms": _percentiles(ttft_s(answered), 1e3),
        "slowdown": _percentiles(slowdown(answered)),
        "tpot_ms": _percentiles([one.tpot_s for one in answered if one.tpot_s is not None], 1e3),
        "queue_age_ms": _percentiles([queue_age_s(one) for one in answered], 1e3),
        "busy_max_over_mean": _max_over_mean(result.prefill_busy_s),
        "decode_busy_max_over_mean": _max_over_mean(result.decode_busy_s),
        "busy_ratio": _rounded(float(np.mean(result.prefill_busy_s)) / result.virtual_s if result.virtual_s else None),
        "hit_ratio": _rounded(sum(one.num_cached for one in answered) / num_prompt if num_prompt else None),
        "failed": dict(sorted(Counter(one.failed for one in result.outcomes if one.failed is not None).items())),
        "virtual_s": round(result.virtual_s, 3),
        "wall_s": round(result.wall_s, 2),
    }


def _percentiles(values: Sequence[float], scale: float = 1.0) -> Percentiles:
    if not values:
        return {f"p{part}": None for part in PARTS}
    found = np.percentile(np.array(values) * scale, PARTS)
    return {f"p{part}": round(float(value), 3) for part, value in zip(PARTS, found, strict=True)}


def _max_over_mean(busy_s: Sequence[float]) -> float | None:
    """1 where all replicas were busy for the same time."""
    mean_s = float(np.mean(busy_s)) if busy_s else 0.0
    return _rounded(max(busy_s) / mean_s if mean_s else None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def table(found: Mapping[str, Any], title: str) -> Table:
    """A row for each policy; the best of each column in bold."""
    shown = Table("policy", title=title)
    columns: list[tuple[str, tuple[str, ...], str]] = [
        *((f"{name} p{part}", (key, f"p{part}"), form) for key, name, form in _PERCENTILES for part in (50, 99)),
        *((name, (key,), form) for key, name, form in _SINGLES),
    ]
    rows = found["policies"]
    cells: list[list[str]] = [[name] for name in rows]
    for heading, path, form in columns:
        shown.add_column(heading, justify="right")
        values = [_at(policy, path) for policy in rows.values()]
        known = [value for value in values if value is not None]
        best = (max if path == ("hit_ratio",) else min)(known, default=None)
        for row, value in zip(cells, values, strict=True):
            text = "" if value is None else format(value, form)
            is_best = value == best and len(rows) > 1 and path != ("busy_ratio",)
            row.append(f"[bold]{text}[/bold]" if is_best and text else text)
    shown.add_column("failed", justify="right")
    for row, policy in zip(cells, rows.values(), strict=True):
        row.append(", ".join(f"{num:,} {code}" for code, num in policy["failed"].items()))
        shown.add_row(*row)
    return shown


_PERCENTILES = (
    *(("ttft_ms", "TTFT ms", ",.0f"), ("slowdown", "slowdown", ",.2f")),
    *(("tpot_ms", "TPOT ms", ",.1f"), ("queue_age_ms", "queue ms", ",.0f")),
)
_SINGLES = (
    *(("busy_ratio", "busy", ".1%"), ("busy_max_over_mean", "busy max/mean", ".3f")),
    ("hit_ratio", "hits", ".1%"),
)


def _at(policy: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = policy
    for key in path:
        value = value[key]
    return None if value is None else float(value)
