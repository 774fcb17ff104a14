"""Fixtures for every folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio-debug", "uvloop"])
def run_async(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a coroutine on both loops: asyncio in debug mode, and uvloop."""
    if request.param == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            yield runner.run
    else:
        with asyncio.Runner(debug=True) as runner:
            yield runner.run
