"""Waiting for something, but not for long."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def wait(event: asyncio.Event, at_most_s: float) -> None:
    """Return once it is set, or after so long. A cancellation goes on, unlike at times with Python 3.11's wait_for."""
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await event.wait()
