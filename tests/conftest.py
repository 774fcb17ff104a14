"""Fixtures for every folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from bus.server import EmbeddedServer, ServerConfig

# Engines would compute on a GPU where there is one: the suite is the same everywhere. For GPUs: run.bench.gpu_check.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Products of small models are slower on two threads than on one, by far when cores are busy.
os.environ["OMP_NUM_THREADS"] = "1"

TENANTS = {"acme": "acme-word", "beta": "beta-word"}
"""Names and passwords of the tenants at the NATS server of the tests."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For two workers (`make test`): a file is one's alone, and so are all that start whole systems, which come first
    as they take longest."""
    items.sort(key=lambda item: "stack" not in item.path.parts)
    for item in items:
        name = "stack" if "stack" in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(params=["asyncio-debug", "uvloop"])
def run_async(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a coroutine on both loops: asyncio in debug mode, and uvloop."""
    if request.param == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            yield runner.run
    else:
        with asyncio.Runner(debug=True) as runner:
            yield runner.run


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerConfig]:
    """A NATS server for the whole run, with two client users, and those of two tenants."""
    config = ServerConfig.write(tmp_path_factory.mktemp("nats"), port=0, num_clients=2, tenants=TENANTS)
    server = EmbeddedServer(config)
    asyncio.run(server.start())
    yield config
    asyncio.run(server.stop())
