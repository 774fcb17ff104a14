"""`shoal bench experts`: what it makes of reports, plans and answers, without a service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from run.bench import experts
from run.bench.rebalance import MAX_REPORTS, NUM_AFTER, Answer, Record, summary
from schemas.experts import ExpertsUsed, PlaceExperts
from schemas.message import Role

OLD, NEW = [0, 1, 2, 3], [0, 2, 1, 3]
"""Two ranks: with rows 5, 3, 1, 1 they have 8 and 2 to do, then 6 and 4."""


def tell(record: Record, at: int, version: int = 0, ranks: tuple[int, ...] = (0, 1)) -> None:
    """The report at second `at`; each rank asked for a part."""
    for rank in ranks:
        used = ExpertsUsed(
            role=Role.DECODE,
            id=f"d-{rank}",
            group="d-0",
            rank=rank,
            size=2,
            generation=1,
            num_steps=16 * at,
            version=version,
            used=[np.array([[5, 0, 1, 0], [0, 3, 0, 1]][rank], "<u4").tobytes()],
            places=[np.array(NEW if version else OLD, "<u2").tobytes()],
        )
        record.report(at, used)


def moved_once() -> Record:
    """A plan, told at 3.1 and again, carried out before 4."""
    record = Record(2)
    for at in (1, 2, 3):
        tell(record, at)
    for at_s in (3.1, 3.9):
        record.plan(at_s, PlaceExperts(generation=1, version=7, places=[]))
    for at in (4, 5, 6):
        tell(record, at, 7)
    return record


def test_it_says_what_was_before_during_and_after() -> None:
    record = moved_once()
    record.answers += [
        Answer(1, "b", 5.0, 6.0, [5.1, 5.2]),
        Answer(0, "a", 1.0, 2.0, [1.1, 1.2, 1.3]),
        Answer(1, "b", 1.0, 2.5, [1.1, 1.2, 1.3]),
        Answer(0, "a", 2.8, 3.8, [2.9, 3.05, 3.2]),
        Answer(1, "x", 3.2, 4.9, [3.5, 3.65]),
    ]
    found = summary(record, {})
    assert found["plans"] == [
        {"version": 7, "num_experts": 2, "num_layers": 1, "of_layers": 1, "planned_ms": 100.0, "num_steps": 16}
    ]
    before, during, after = (found["phases"][phase] for phase in ("before", "during", "after"))
    assert [before[key] for key in ("balance", "step_ms", "num_steps", "num_different")] == [1.6, 100.0, 4, 0]
    assert [during[key] for key in ("ratio", "num_steps", "num_answers", "num_different")] == [1.5, 3, 2, 1]
    assert "balance" not in during
    assert [after[key] for key in ("balance", "ratio", "p90_ratio", "num_answers")] == [1.2, 1.0, 1.0, 1]
    assert summary(record, {0: "of the size before", 1: "b"})["phases"]["before"]["num_different"] == 1


def test_the_time_between_two_plans_is_of_no_phase_and_steps_that_a_rank_did_not_report_do_not_count() -> None:
    record = moved_once()
    tell(record, 7, 7, ranks=(0,))
    record.plan(6.1, PlaceExperts(generation=1, version=9, places=[]))
    assert len(record.moved) == 1 and not record.is_over
    tell(record, 8, 9)
    spans = [(0.0, 3.0), (2.9, 3.1), (4.0, 5.0), (6.5, 6.6), (8.0, 9.0)]
    assert [record.phase(*span) for span in spans] == ["before", "during", "", "during", "after"]
    assert [len(record.reports), record.moved[1].start.num_steps] == [7, 96]


def test_it_goes_on_until_the_balancer_has_looked_again_or_for_so_many_reports() -> None:
    record, idle = moved_once(), Record(2)
    for at in range(7, 4 + NUM_AFTER):
        tell(record, at, 7)
        assert not record.is_over
    tell(record, 4 + NUM_AFTER, 7)
    assert record.is_over
    for at in range(MAX_REPORTS):
        assert not idle.is_over
        tell(idle, at)
    assert idle.is_over and summary(idle, {}) == {"plans": [], "phases": {}}


def test_tokens_that_come_together_are_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            for content in (None, "o", "n", "e ", "two", None):
                yield {"choices": [{"delta": {"content": content}}]}
            yield {"choices": [], "usage": {}}

    times = iter([0.0, 1.0, 1.00001, 1.00002, 1.1, 1.2])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    assert experts._ask(Client(), 5, {}) == Answer(5, "one two", 0.0, 1.2, [1.0, 1.1])  # type: ignore[arg-type]
