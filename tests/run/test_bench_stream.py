"""`shoal bench stream`: an open loop, whose figures count what clients waited for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from run.bench.stream import Seen, bench_stream, figures, run_open
from run.client import GatewayError
from run.settings import SettingsError


def test_figures_are_of_what_ended_well() -> None:
    streams = [Seen(0.1 * n, [1.0, 1.2, 1.3 + 0.1 * n], num_tokens=11) for n in range(1, 11)]
    found = figures([*streams, Seen(9.0, [1.0, 99.0], 500, error="lost")], took_s=2.0)
    assert (found["num_requests"], found["num_failed"], found["tok_s"]) == (11, 1, 55.0)
    assert found["tokens_per_event"] == round(11 / 3, 2)
    assert found["ttft_ms"] == {"p50": 550.0, "p90": 910.0, "p99": 991.0}
    assert found["tpot_ms"]["p50"] == 85.0  # 0.3 s, and 0.05 of them a stream, over the ten tokens behind the first
    assert found["gap_ms"]["p50"] == 200.0 and found["gap_ms"]["p99"] > 1000
    assert figures([Seen(error="lost")], 1.0)["gap_ms"] == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_requests_come_whether_others_have_ended_or_not() -> None:
    barrier = threading.Barrier(5)
    asked = []

    def ask(chance: random.Random) -> Iterator[dict[str, Any]]:
        asked.append(time.perf_counter())
        if len(asked) > 5:
            raise GatewayError("no more")
        barrier.wait(30)  # none ends before five have come
        yield {"choices": [{"delta": {"content": "a"}}]}
        yield {"choices": [{"delta": {}}], "usage": {"completion_tokens": 1}}

    seen, took_s = run_open(ask, 400.0, 0.05, lambda _: None)
    assert len(seen) == len(asked) > 5 and took_s > 0
    assert [one.error for one in seen].count("no more") == len(seen) - 5
    assert all(one.ttft_s > 0 and one.num_tokens == 1 for one in seen if not one.error)


@pytest.mark.parametrize("wrong", [{"rate": (float("nan"),)}, {"seconds": 0.0}, {"num_tokens": 0}])
def test_what_cannot_be_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="above 0"):
        bench_stream(**wrong)
