"""What a simulation found, as numbers and as a table: the same keys for `--json` and for the plots' titles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    """A column for each policy; the best of each row in bold."""
    policies = found["policies"]
    shown = Table("", *policies, title=title)
    for column in shown.columns[1:]:
        column.justify = "right"
    for key, name, form in _PERCENTILES:
        for part in (f"p{part}" for part in PARTS):
            values = [policy[key][part] for policy in policies.values()]
            shown.add_row(f"{name}, {part}", *_cells(values, form, min))
        shown.add_section()
    for key, name, form, best in _SINGLES:
        shown.add_row(name, *_cells([policy[key] for policy in policies.values()], form, best))
    shown.add_section()
    for code in sorted({code for policy in policies.values() for code in policy["failed"]}):
        shown.add_row(f"failed: {code}", *(f"{policy['failed'].get(code, 0):,}" for policy in policies.values()))
    return shown


def _cells(values: Sequence[float | None], form: str, best: Callable[[list[float]], float] | None) -> list[str]:
    known = [value for value in values if value is not None]
    chosen = best(known) if best and known and len(values) > 1 else None
    texts = ["" if value is None else format(value, form) for value in values]
    return [
        f"[bold]{text}[/bold]" if value is not None and value == chosen else text
        for text, value in zip(texts, values, strict=True)
    ]


_PERCENTILES = (
    *(("ttft_ms", "TTFT ms", ",.0f"), ("slowdown", "slowdown", ",.2f")),
    *(("tpot_ms", "TPOT ms", ",.1f"), ("queue_age_ms", "waiting ms", ",.0f")),
)
_SINGLES: tuple[tuple[str, str, str, Callable[[list[float]], float] | None], ...] = (
    ("busy_ratio", "prefill busy", ".1%", None),
    ("busy_max_over_mean", "its max/mean", ".3f", min),
    ("decode_busy_max_over_mean", "decode max/mean", ".3f", min),
    ("hit_ratio", "hits", ".1%", max),
)
