"""A loop that does not come on is found out, and one that only takes long is not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from bus.pulse import FIRST_STALL_S, NUM_FIRST, STALL_S, Pulse
from run.virtual import VirtualLoop, run_virtual


async def lived_s(num_turns: int, last_s: float, *, patience_s: float = 0.0, pause_s: float = 0.0) -> float | None:
    """When it died, in its turn `num_turns` that takes so long, all before being quick; None if it did not. A pause is
    of the whole process, in the middle of a turn."""
    loop, died_s = asyncio.get_running_loop(), list[float]()
    assert isinstance(loop, VirtualLoop)
    tasks, has_work = list[asyncio.Task[Any]](), asyncio.Event()

    def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    pulse = Pulse("decode/d0", patience_s, spawn, lambda: died_s.append(loop.time()))
    await asyncio.sleep(10_000)  # nothing to do
    has_work.set()
    for _ in range(num_turns):
        await pulse.turn(has_work)
        await asyncio.sleep(0.01)
    began_s = loop.time()
    if pause_s:
        await asyncio.sleep(5)
        loop._selector.now_s += pause_s
        await asyncio.sleep(5)
    await asyncio.sleep(last_s)
    has_work.clear()
    spawn(pulse.turn(has_work))
    await asyncio.sleep(10_000)
    for task in tasks:
        task.cancel()
    return died_s[0] - began_s if died_s else None


@pytest.mark.parametrize(
    ("num_turns", "limit_s", "patience_s"),
    [(1, FIRST_STALL_S, 0.0), (NUM_FIRST + 1, STALL_S, 0.0), (NUM_FIRST + 1, STALL_S + 15, 15.0)],
)
def test_a_turn_may_take_long_and_not_for_ever(num_turns: int, limit_s: float, patience_s: float) -> None:
    assert run_virtual(lived_s(num_turns, limit_s - 2, patience_s=patience_s)) is None
    died_s = run_virtual(lived_s(num_turns, 100_000, patience_s=patience_s))
    assert died_s is not None and limit_s - 1 <= died_s <= limit_s + 2


def test_a_pause_of_the_process_accuses_nobody() -> None:
    assert run_virtual(lived_s(NUM_FIRST + 1, 1, pause_s=300)) is None
