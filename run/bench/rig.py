"""Real actors in this process, on a memory bus: no broker, no sockets; the real clock, and real threads."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from isal.isal_zlib import crc32

from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus
from bus.memory import MemoryBroker, MemoryWire


class _Bulk(MemoryBulk):
    async def checksum(self, data: bytes) -> int:
        """Beside the loop, as with sockets."""
        return await asyncio.to_thread(crc32, data)


class Rig:
    """Use as an async context: at its end all is stopped, the last actor first, and closed."""

    def __init__(self) -> None:
        self._broker = MemoryBroker()
        self._hub = MemoryHub()
        self._places: list[tuple[Bus, MemoryBulk]] = []
        self._running: list[asyncio.Task[None]] = []

    async def place(self) -> tuple[Bus, MemoryBulk]:
        """Bus and bulk for an actor, or for whoever talks to one."""
        place = Bus(MemoryWire(self._broker)), _Bulk(self._hub)
        self._places.append(place)
        await place[0].open()
        await place[1].start()
        return place

    async def add(self, actor: Actor) -> None:
        """Start an actor and wait until it is ready. Raises what ended it, if that came first."""
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(actor.run(lambda: ready.set_result(None)))
        self._running.append(task)
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in reversed(self._running):
            task.cancel()
            await asyncio.wait([task])
        for bus, bulk in self._places:
            await bulk.close()
            await bus.close()
