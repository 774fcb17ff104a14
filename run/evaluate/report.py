"""The table of what was asked: a row's figures as one object, and rows as a table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from run.evaluate.asking import ENDED, Answer
from run.evaluate.interval import wilson
from run.evaluate.questions import NUM_DEPTHS, RECALL
from run.train.judge import JSON_SKILL

Row = dict[str, Any]


def rows(answers: Sequence[Answer]) -> list[Row]:
    """Figures of each skill, in the order asked: of recall also of each tenth of the note (they have a `part`), of JSON
    how much is valid and how much is correct."""
    found = []
    for name in dict.fromkeys(answer.question.row for answer in answers):
        group = [answer for answer in answers if answer.question.row == name]
        if name == JSON_SKILL:
            found.append(_row("json valid", group, lambda answer: answer.is_json))
            found.append(_row("json correct", group, lambda answer: answer.is_correct))
            continue
        found.append(_row(name, group, lambda answer: answer.is_correct))
        if name.startswith(RECALL):
            for part in range(NUM_DEPTHS):
                deep = [answer for answer in group if answer.question.part == part]
                found.append(_row(name, deep, lambda answer: answer.is_correct) | {"part": part})
    return found


def share(num_right: int, num: int) -> Row:
    """A share with its interval, in percent."""
    low, high = wilson(num_right, num)
    return {
        "num": num,
        "percent": round(100 * num_right / num, 2) if num else None,
        "interval": [round(100 * low, 2), round(100 * high, 2)],
    }


def same_rows(bounded: Sequence[Answer], exact: Sequence[Answer]) -> list[Row]:
    """For each length: how often the answer is the one that the exact prompt gives, and how many of each are right."""
    found = []
    for name in dict.fromkeys(answer.question.row for answer in bounded):
        pairs = [pair for pair in zip(bounded, exact, strict=True) if pair[0].question.row == name]
        num_same = sum(one.message == other.message and not one.failure and not other.failure for one, other in pairs)
        right = {
            kind: round(100 * sum(pair[place].is_correct for pair in pairs) / len(pairs), 2)
            for place, kind in enumerate(("replay_percent", "exact_percent"))
        }
        found.append({"skill": name, **share(num_same, len(pairs)), **right})
    return found


def skills_table(found: Sequence[Row], title: str) -> Table:
    """A table of what `rows` gives. Trouble is what should not be: answers that did not end, by what their stream says;
    that let a control sequence through (leaks); requests that failed."""
    table = new_table(title, "skill", "asked", "correct %", "95 %", "TTFT ms", "tok/s", "cached %", "trouble")
    for row in found:
        is_part = "part" in row
        table.add_row(
            f"  {10 * row['part']} to {10 * row['part'] + 10} %" if is_part else row["skill"],
            f"{row['num']:,}",
            *share_cells(row),
            *(_cell(row[key], 0) for key in ("ttft_ms", "tokens_s", "cached_percent")),
            ", ".join(_troubles(row)) or "-",
            style="dim" if is_part else None,
        )
    return table


def same_table(found: Sequence[Row]) -> Table:
    """A table of what `same_rows` gives."""
    title = "bounded replay against exact prompts: the same answer"
    table = new_table(title, "set", "asked", "same %", "95 %", "correct %", "exact, correct %")
    for row in found:
        right = (f"{row[key]:.1f}" for key in ("replay_percent", "exact_percent"))
        table.add_row(row["skill"], f"{row['num']:,}", *share_cells(row), *right)
    return table


def new_table(title: str, first: str, *others: str) -> Table:
    """A table whose first column has names, and whose others have figures."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for header in others:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def share_cells(row: Row) -> tuple[str, str]:
    """What `share` gives, as two cells."""
    low, high = row["interval"]
    return _cell(row["percent"], 1), f"{low:.1f}-{high:.1f}"


def _row(name: str, answers: Sequence[Answer], is_right: Callable[[Answer], bool]) -> Row:
    came = [answer for answer in answers if not answer.failure]
    took_s = sum(answer.took_s for answer in came if answer.num_tokens > 1)
    num_later = sum(answer.num_tokens - 1 for answer in came if answer.num_tokens > 1)
    num_prompt = sum(answer.num_prompt_tokens for answer in came)
    num_cached = sum(answer.num_cached_tokens for answer in came)
    return {
        "skill": name,
        **share(sum(is_right(answer) for answer in answers), len(answers)),
        "prompt_tokens": round(num_prompt / len(came)) if came else None,
        "answer_tokens": round(sum(answer.num_tokens for answer in came) / len(came), 1) if came else None,
        "ttft_ms": round(1e3 * statistics.median(answer.ttft_s for answer in came), 1) if came else None,
        "tokens_s": round(num_later / took_s, 1) if took_s else None,
        "cached_percent": round(100 * num_cached / num_prompt, 1) if num_prompt else None,
        "not_ended": dict(Counter(answer.finish or "none" for answer in came if answer.finish not in ENDED)),
        "num_leaks": sum(answer.leaks for answer in answers),
        "num_failed": len(answers) - len(came),
    }


def _troubles(row: Row) -> list[str]:
    numbers = {**row["not_ended"], "leaks": row["num_leaks"], "failed": row["num_failed"]}
    return [f"{num} {name}" for name, num in numbers.items() if num]


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
