"""Both wires behind one fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from bus.broker import NatsWire
from bus.bus import Bus, Wire
from bus.memory import MemoryBroker, MemoryWire
from bus.server import ServerConfig


class Net:
    """Makes connections to one broker and closes them at the end of `open`."""

    def __init__(self, connect: Callable[[], Awaitable[Wire]]) -> None:
        self._connect = connect

    @asynccontextmanager
    async def wires(self, num: int) -> AsyncIterator[list[Wire]]:
        """So many connections."""
        async with AsyncExitStack() as stack:
            wires = []
            for _ in range(num):
                wire = await self._connect()
                stack.push_async_callback(wire.close)
                wires.append(wire)
            yield wires

    @asynccontextmanager
    async def buses(self, num: int) -> AsyncIterator[list[Bus]]:
        """So many buses, open, each on its own connection."""
        async with self.wires(num) as wires:
            buses = [Bus(wire) for wire in wires]
            for bus in buses:
                await bus.open()
                await bus.wire.flush()
            yield buses
            for bus in buses:
                await bus.close()


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
def net(request: pytest.FixtureRequest) -> Net:
    """A broker of each kind."""
    if request.param == "memory":
        broker = MemoryBroker()

        async def connect() -> Wire:
            return MemoryWire(broker)
    else:
        config: ServerConfig = request.getfixturevalue("nats_server")

        async def connect() -> Wire:
            return await NatsWire.connect(config.url(config.internal), name="test")

    return Net(connect)
