"""Stand-ins for writers and metadata shards, and for the actor whose blocks and snapshots they get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from msgspec import structs

from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, BusError, Delivery, Seams, decoder
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import KEPT, STORE
from schemas.cache import BlocksWritten, Snapshot, SnapshotsKept, StoreBlocks
from schemas.failure import Failure
from schemas.message import Role
from schemas.routing import LoadReported
from tests.actors.builders import report


class Place:
    """A memory bus and bulk for each who is there, on the clock of the loop."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.hub = MemoryHub()
        self.tasks: set[asyncio.Task[Any]] = set()

    async def bus(self) -> Bus:
        clock = asyncio.get_running_loop().time
        bus = Bus(MemoryWire(self.broker), Seams(lambda: int(clock() * 1e9)))
        await bus.open()
        return bus

    async def bulk(self, **settings: int) -> MemoryBulk:
        bulk = MemoryBulk(self.hub, **settings)
        await bulk.start()
        return bulk

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    """What was begun in it ends with it; what went wrong in it comes out."""
    here = Place()
    yield here
    for task in here.tasks:
        task.cancel()
    for outcome in await asyncio.gather(*here.tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def load(role: Role, id: str, incarnation: str = "a", *, is_accepting: bool = True) -> LoadReported:
    return structs.replace(report(id, incarnation=incarnation), role=role, is_accepting=is_accepting)


class FakeWriter:
    """Takes blocks; says so, says no, or says nothing."""

    def __init__(self, here: Place, id: str) -> None:
        self.id = id
        self.failure: Failure | None = None
        self.is_silent = False
        self.messages: list[StoreBlocks] = []
        self.blocks: dict[bytes, tuple[bytes, bytes, bool]] = {}  # key -> parent, payload, approximate
        self._here = here

    async def start(self) -> None:
        self._bus, self._bulk = await self._here.bus(), await self._here.bulk()
        await self._bus.wire.subscribe(STORE.at(self.id).name, self._on_delivery)

    def end(self) -> None:
        self._bus.wire.cut()  # type: ignore[attr-defined]

    def _on_delivery(self, delivery: Delivery) -> None:
        message = decoder(StoreBlocks).decode(delivery.body)
        self.messages.append(message)
        if not self.is_silent:
            self._here.spawn(self._write(message, delivery.reply))

    async def _write(self, message: StoreBlocks, reply: str) -> None:
        if self.failure is not None:
            await self._bus.answer(reply, self.failure)
            return
        try:
            payloads = await self._bulk.unwrap(message.payloads)
        except BusError as error:
            await self._bus.answer(reply, error.failure)
            return
        num = len(message.keys) // 16
        size = len(payloads) // num
        for i in range(num):
            at = slice(16 * i, 16 * (i + 1))
            payload = payloads[size * i : size * (i + 1)]
            self.blocks[message.keys[at]] = message.parents[at], payload, message.approximate
        await self._bus.answer(reply, BlocksWritten(num_new=num))


class FakeShard:
    """A metadata shard that remembers what snapshots it was told of."""

    def __init__(self, here: Place, id: str) -> None:
        self.id = id
        self.incarnation = 0
        self.known: dict[bytes, Snapshot] = {}
        self.heard: list[Snapshot] = []
        self._here = here

    async def start(self) -> None:
        self._bus = await self._here.bus()
        await self._bus.wire.subscribe(KEPT.at(self.id).name, self._on_delivery)

    def report(self) -> LoadReported:
        return load(Role.METADATA, self.id, str(self.incarnation))

    def restart(self) -> None:
        self.known.clear()
        self.incarnation += 1

    def _on_delivery(self, delivery: Delivery) -> None:
        for snapshot in decoder(SnapshotsKept).decode(delivery.body).snapshots:
            self.heard.append(snapshot)
            self.known[snapshot.key] = snapshot
