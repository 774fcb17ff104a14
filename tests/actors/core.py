"""Entrypoint, balancers, prefill and decode on a memory bus, with a recipe that only listens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from actors.balancers.actor import DecodeBalancer, PrefillBalancer
from actors.decode.actor import Decode
from actors.entrypoint.actor import Entrypoint
from actors.prefill.actor import Prefill
from bus.actor import Actor, Envelope, Handler
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, Seams
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import CANCEL, RECIPE_TOKENS, SUBMIT, Subject
from kernels.engine import EngineInfo
from kernels.timed import StepCost, TimedEngine
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, CancelReason, End, Submit, Taken, TokensEmitted

VOCABULARY = range(100, 1000)


def info(**fields: Any) -> EngineInfo:
    defaults: dict[str, Any] = {
        "model": "timed",
        "layout": "timed",
        "vocab_size": 1000,
        "eos_token": 1,
        "max_tokens": 1000,
        "num_slots": 4,
        "max_step_tokens": 256,
    }
    return EngineInfo(**{**defaults, **fields})


class Listener(Actor):
    """Stands in for a recipe: what came, per request, with every break of the rules noted."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, End] = {}
        self.wrongs: list[str] = []
        self._is_over: dict[str, asyncio.Event] = {}

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RECIPE_TOKENS: self._on_tokens}

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        ends, start = dict(emitted.ends), 0
        for i, request_id in enumerate(emitted.request_ids):
            known = self.tokens.setdefault(request_id, [])
            if emitted.first_indexes[i] != len(known):
                self.wrongs.append(f"{request_id}: index {emitted.first_indexes[i]} after {len(known)} tokens")
            if request_id in self.ends:
                self.wrongs.append(f"{request_id}: something after the end")
            known.extend(emitted.tokens[start : start + emitted.counts[i]])
            start += emitted.counts[i]
            if i in ends:
                self.ends[request_id] = ends[i]
                self.over(request_id).set()
        return Taken()

    def over(self, request_id: str) -> asyncio.Event:
        return self._is_over.setdefault(request_id, asyncio.Event())


class Core:
    """The actors of a small system, each on a wire of its own so that it can be cut."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.broker = MemoryBroker()
        self.hub = MemoryHub()
        self.wires: dict[str, MemoryWire] = {}
        self.bulks: dict[str, MemoryBulk] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.actors: dict[str, Actor] = {}

    async def bus(self, name: str) -> Bus:
        clock = asyncio.get_running_loop().time
        wire = self.wires[name] = MemoryWire(self.broker)
        bus = Bus(wire, Seams(clock_ns=lambda: int(clock() * 1e9), random=self.random, host="host", pid=1))
        await bus.open()
        return bus

    async def bulk(self, name: str) -> MemoryBulk:
        bulk = self.bulks[name] = MemoryBulk(self.hub)
        await bulk.start()
        return bulk

    async def add(self, actor: Actor) -> None:
        """Start an actor and wait until it is ready."""
        name = f"{actor.role}/{actor.id}"
        ready = asyncio.Event()
        self.actors[name] = actor
        task = self.tasks[name] = asyncio.create_task(actor.run(ready.set), name=name)
        waiter = asyncio.create_task(ready.wait())
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if task.done():
            task.result()

    async def add_prefill(self, id: str, cost: StepCost | None = None, **fields: Any) -> Prefill:
        name = f"prefill/{id}"
        engine = TimedEngine(info(**fields), VOCABULARY, cost)
        prefill = Prefill(id, await self.bus(name), await self.bulk(name), engine)
        await self.add(prefill)
        return prefill

    async def add_decode(self, id: str, cost: StepCost | None = None, **fields: Any) -> Decode:
        name = f"decode/{id}"
        engine = TimedEngine(info(**fields), VOCABULARY, cost)
        decode = Decode(id, await self.bus(name), await self.bulk(name), engine)
        await self.add(decode)
        return decode

    def kill(self, name: str) -> None:
        """End an actor without a word: it loses its wire and bulk first, so that its clean-up cannot speak."""
        self.wires[name].cut()
        if name in self.bulks:
            self.bulks[name].cut()
        self.tasks[name].cancel()

    async def stop(self) -> None:
        for task in reversed(self.tasks.values()):
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    # What a client does

    @property
    def listener(self) -> Listener:
        listener = self.actors["recipe/rc0"]
        assert isinstance(listener, Listener)
        return listener

    @property
    def entrypoint(self) -> Entrypoint:
        entrypoint = self.actors["entrypoint/e0"]
        assert isinstance(entrypoint, Entrypoint)
        return entrypoint

    async def send(self, submit: Submit) -> None:
        await self.listener.bus.ask(SUBMIT.at("e0"), submit, timeout_s=5)

    async def finish(self, submit: Submit) -> tuple[list[int], End]:
        """Submit, and wait for the end."""
        await self.send(submit)
        await self.listener.over(submit.request_id).wait()
        return self.listener.tokens[submit.request_id], self.listener.ends[submit.request_id]

    async def cancel(self, request_id: str, reason: CancelReason = CancelReason.CLIENT) -> CancelAcknowledged:
        cancel = Cancel(request_id=request_id, reason=reason)
        return await self.listener.bus.ask(CANCEL.at("e0"), cancel, timeout_s=30)

    def held(self) -> dict[str, int]:
        """Everything that must be zero once all requests have ended and the system is quiet."""
        held = {"entrypoint": self.entrypoint.shard.num_live}
        for name, actor in self.actors.items():
            if self.tasks[name].done():
                continue
            if isinstance(actor, Prefill):
                held[name] = len(actor.load().reservations) + len(actor._engine._requests)  # type: ignore[attr-defined]
            elif isinstance(actor, Decode):
                held[name] = len(actor.slots) + len(actor._engine._requests)  # type: ignore[attr-defined]
            elif isinstance(actor, PrefillBalancer | DecodeBalancer):
                held[name] = actor.ledger.num_reserved
        for name, bulk in self.bulks.items():
            held[f"bulk of {name}"] = bulk.num_offers
        return held


@asynccontextmanager
async def core(num_prefill: int = 1, num_decode: int = 1, cost: StepCost | None = None) -> AsyncIterator[Core]:
    """A running system; whatever a test does in it, no rule of the token stream may have been broken."""
    system = Core()
    try:
        await system.add(Listener("rc0", await system.bus("recipe/rc0")))
        await system.add(PrefillBalancer("pb0", await system.bus("prefill-balancer/pb0")))
        await system.add(DecodeBalancer("db0", await system.bus("decode-balancer/db0")))
        for index in range(num_prefill):
            await system.add_prefill(f"p{index}", cost)
        for index in range(num_decode):
            await system.add_decode(f"d{index}", cost)
        await system.add(Entrypoint("e0", await system.bus("entrypoint/e0"), await system.bulk("entrypoint/e0")))
        yield system
        assert system.listener.wrongs == []
    finally:
        await system.stop()


async def quiet(system: Core, limit_s: float = 60.0) -> dict[str, int]:
    """Wait until nothing is held, at most `limit_s`; what is still held."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while any(system.held().values()) and loop.time() < end_s:
        await asyncio.sleep(0.01)
    return {name: number for name, number in system.held().items() if number}
