"""Tables of what `shoal simulate experts` found; the same figures as its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from run.evaluate.report import new_table


def tables(found: Mapping[str, Any]) -> list[Table]:
    """What ranks read, steps before and after experts are placed, and what moves over time."""
    return [_reads(found), _steps(found), _moves(found)]


def _reads(found: Mapping[str, Any]) -> Table:
    columns = ("experts GB", "rows", "experts with rows", "MB a layer", "GB a step", "MB a token", "step ms", "tok/s")
    table = new_table("simulated, tasks as recorded: what a rank reads of its experts in a step", "EP", *columns)
    table.caption, table.caption_justify = "(more than a rank holds): on paper only", "left"
    for row in found["steady"]:
        if row["workload"] == "recorded":
            held = f"{row['memory_gb']:.1f}"
            table.add_row(
                str(row["ep"]),
                held if row["fits"] else f"({held})",
                str(row["rows"]),
                f"{row['touched']:.1f} of {row['slots']}",
                f"{row['layer_mb']:,.0f}",
                f"{row['step_gb']:,.1f}",
                f"{row['token_mb']:,.0f}",
                f"{row['step_ms_after']:.1f}",
                f"{row['tokens_s_after']:,}",
            )
    return table


def _steps(found: Mapping[str, Any]) -> Table:
    most = max(row["rows"] for row in found["steady"])
    columns = ("EP", "max/mean", "step ms", "tok/s a rank", "attention", "experts", "exchange ms")
    table = new_table(f"simulated, {most} rows a rank: before and after experts are placed", "load", *columns)
    for row in found["steady"]:
        if row["rows"] == most:
            parts = row["parts_ms"]
            table.add_row(
                row["workload"],
                str(row["ep"]),
                f"{row['balance_before']:.2f} {row['balance_after']:.2f}",
                f"{row['step_ms_before']:.1f} {row['step_ms_after']:.1f}",
                f"{row['tokens_s_before']:,} {row['tokens_s_after']:,}",
                *(f"{parts[name]:.1f}" for name in ("attention", "experts", "exchange")),
            )
    return table


def _moves(found: Mapping[str, Any]) -> Table:
    columns = (
        "EP",
        "max/mean",
        "placed",
        "changed",
        "in the end",
        "plans",
        "slots a layer",
        "seconds",
        "better in s",
    )
    table = new_table("simulated over time: the load changes half way, the balancer's plans follow", "load", *columns)
    table.caption_justify = "left"
    table.caption = "slots that change, and how long ranks load them: of the first plan, and of all later ones"
    for row in found["moving"]:
        moved = [plan for plan in row["plans"] if plan["num_moved"]]
        table.add_row(
            row["workload"],
            str(row["ep"]),
            *(f"{row[name]:.2f}" for name in ("start", "settled", "changed", "end")),
            f"{len(moved)} of {len(row['plans'])}",
            *(
                f"{sum(one[name] for one in moved[:1]):.{digits}f} + {sum(one[name] for one in moved[1:]):.{digits}f}"
                for name, digits in (("num_moved", 0), ("load_s", 1))
            ),
            "-" if row["recovered_s"] is None else f"{row['recovered_s']:.0f}",
        )
    return table
