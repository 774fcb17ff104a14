"""The seed of the simulator: the real actors on the memory bus, timed engines, and nothing else of the world.

Run it under `run.virtual`: one seed then gives one history, which `World.history` digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from typing import Any

from actors.balancers.actor import DecodeBalancer, PrefillBalancer, VisionBalancer
from actors.decode.actor import Decode
from actors.entrypoint.actor import Entrypoint
from actors.kvstore.actor import KVStore
from actors.metadata.actor import Metadata
from actors.prefill.actor import Prefill
from actors.recipe.actor import Recipe
from actors.recipe.card import ModelCard
from actors.rules.tenants import Tenants
from actors.writer.actor import Writer
from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, Delivery, Seams
from bus.memory import MemoryBroker, MemoryWire
from bus.memory_files import MemoryFiles, MemoryFolder
from kernels.engine import EngineInfo
from kernels.timed import StepCost, TimedEngine


class RecordingBroker(MemoryBroker):
    """Digests everything that is published, with its time: equal digests, equal histories."""

    def __init__(self) -> None:
        super().__init__()
        self._history = hashlib.sha256()
        self.num_messages = 0

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        self.record(delivery)
        super().publish(source, delivery)

    def record(self, delivery: Delivery) -> None:
        """It is part of the history."""
        at = asyncio.get_running_loop().time()
        self._history.update(f"{at!r} {delivery.subject} {delivery.reply} {len(delivery.body)} ".encode())
        self._history.update(delivery.body)
        self.num_messages += 1

    @property
    def history(self) -> str:
        return self._history.hexdigest()


class World:
    """Actors by `role/id`, each with a wire and bulk of its own, so that it can be cut off and killed."""

    def __init__(self, seed: int, broker: MemoryBroker | None = None) -> None:
        self.random = random.Random(seed)
        self.broker = broker or MemoryBroker()
        self.actors: dict[str, Actor] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.wires: dict[str, MemoryWire] = {}
        self.bulks: dict[str, MemoryBulk] = {}
        self.files: dict[str, MemoryFiles] = {}
        self.folder = MemoryFolder()
        self.pids: dict[str, int] = {}
        """Of the present process of each: as if each actor had its own."""
        self.hub = MemoryHub()

    async def bus(self, name: str) -> Bus:
        """A bus for one actor or client, on the virtual clock and the world's chance."""
        clock = asyncio.get_running_loop().time
        wire = self.wires[name] = self.make_wire(name)
        pid = self.pids[name] = self.broker.num_wires
        seams = Seams(
            lambda: int(clock() * 1e9), self.random, host="host", pid=pid, run_beside=_run_inline, die=self._dies(name)
        )
        bus = Bus(wire, seams)
        await bus.open()
        return bus

    def _dies(self, name: str) -> Callable[[], None]:
        return lambda: self.kill(name)

    async def bulk(self, name: str) -> MemoryBulk:
        """A bulk for one actor."""
        bulk = self.bulks[name] = self.make_bulk(name)
        await bulk.start()
        return bulk

    def make_wire(self, name: str) -> MemoryWire:
        """A connection to the broker, for one actor or client."""
        return MemoryWire(self.broker)

    def make_bulk(self, name: str) -> MemoryBulk:
        """A place for the offers of one actor, whose wire there is already."""
        return MemoryBulk(self.hub)

    def open_files(self, name: str) -> MemoryFiles:
        """The folder of slabs, which all share, for one actor."""
        files = self.files[name] = MemoryFiles(self.folder)
        return files

    async def add(self, actor: Actor) -> None:
        """Start an actor and wait until it is ready. Raises what ended it, if that came first."""
        name = f"{actor.role}/{actor.id}"
        ready = asyncio.get_running_loop().create_future()
        self.actors[name] = actor
        task = self.tasks[name] = asyncio.create_task(actor.run(lambda: ready.set_result(None)), name=name)
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

    async def add_prefill(self, id: str, engine: TimedEngine) -> None:
        name = f"prefill/{id}"
        files = self.open_files(name)
        await self.add(Prefill(id, await self.bus(name), await self.bulk(name), engine, files))

    async def add_decode(self, id: str, engine: TimedEngine) -> None:
        name = f"decode/{id}"
        await self.add(Decode(id, await self.bus(name), await self.bulk(name), engine))

    async def add_balancers(self) -> None:
        await self.add(PrefillBalancer("pb0", await self.bus("prefill-balancer/pb0")))
        await self.add(DecodeBalancer("db0", await self.bus("decode-balancer/db0")))

    async def add_vision_balancer(self) -> None:
        await self.add(VisionBalancer("vb0", await self.bus("vision-balancer/vb0")))

    async def add_entrypoint(self, id: str) -> None:
        name = f"entrypoint/{id}"
        await self.add(Entrypoint(id, await self.bus(name), await self.bulk(name)))

    async def add_metadata(self, id: str) -> None:
        name = f"metadata/{id}"
        await self.add(Metadata(id, await self.bus(name), await self.bulk(name)))

    async def add_kvstore(self, id: str, budget_bytes: int) -> None:
        name = f"kvstore/{id}"
        files = self.open_files(name)
        await self.add(KVStore(id, await self.bus(name), await self.bulk(name), files, budget_bytes))

    async def add_writer(self, id: str, slab_bytes: int) -> None:
        name = f"writer/{id}"
        files = self.open_files(name)
        await self.add(Writer(id, await self.bus(name), await self.bulk(name), files, slab_bytes))

    async def add_recipe(self, id: str, card: ModelCard) -> None:
        name = f"recipe/{id}"
        await self.add(Recipe(id, await self.bus(name), await self.bulk(name), card, Tenants()))

    def kill(self, name: str) -> None:
        """End an actor without a word: it loses its wire, bulk and files first, so that its clean-up cannot speak."""
        self.wires[name].cut()
        if name in self.bulks:
            self.bulks[name].cut()
        if name in self.files:
            self.files[name].cut()
        self.tasks[name].cancel()

    async def stop(self) -> None:
        """Stop all actors, the last one first."""
        for task in reversed(self.tasks.values()):
            task.cancel()
            await asyncio.wait([task])


async def _run_inline(work: Callable[[], Any]) -> Any:
    """There are no threads: the world waits for it, and its clock with it."""
    return work()


def engine_for(card: ModelCard, vocab_size: int, cost: StepCost, num_slots: int = 16) -> TimedEngine:
    """A timed engine that serves a model card: its context, and its ordinary tokens (control tokens are the last)."""
    info = EngineInfo(
        model=card.name,
        layout="timed",
        vocab_size=vocab_size,
        eos_token=card.eos_token,
        max_tokens=card.context_tokens,
        num_slots=num_slots,
        max_step_tokens=2048,
        capacity_tokens=num_slots * card.context_tokens,
        space=f"timed {card.name}",
        block_bytes=64,
    )
    return TimedEngine(info, range(3, vocab_size - 64), cost, mean_output=64, most_accepted=6)
