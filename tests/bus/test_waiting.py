"""Waiting for an event, but not for long."""

from __future__ import annotations

import asyncio

import pytest

from bus.waiting import wait
from run.virtual import run_virtual


def test_it_is_over_with_the_event_or_the_time() -> None:
    async def main() -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(2.0, event.set)
        for at_most_s, over_s in ((0.5, 0.5), (10.0, 2.0)):
            await wait(event, at_most_s)
            assert loop.time() == over_s

    run_virtual(main())


def test_a_cancellation_at_the_moment_of_the_event_goes_on() -> None:
    async def main() -> None:
        event = asyncio.Event()
        task = asyncio.create_task(wait(event, 10.0))
        await asyncio.sleep(0.1)
        event.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
