"""Entrypoint, balancers, prefill and decode on a memory bus, with a recipe that only listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from actors.balancers.actor import Balancer
from actors.decode.actor import Decode
from actors.entrypoint.actor import Entrypoint
from actors.prefill.actor import Prefill
from actors.rules.load import promised_tokens
from bus.actor import Actor, Envelope, Handler
from bus.bus import Bus
from bus.subjects import CANCEL, RECIPE_TOKENS, SUBMIT, Subject
from kernels.engine import EngineInfo
from kernels.timed import StepCost, TimedEngine
from run.simulator import RecordingBroker, World
from schemas.message import Role
from schemas.request import (
    Cancel,
    CancelAcknowledged,
    CancelReason,
    End,
    Preempted,
    Submit,
    Taken,
    TokenLogprobs,
    TokensEmitted,
)

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
        "space": "timed",
        "block_bytes": 64,
    }
    values = {**defaults, **fields}
    capacity_tokens = values["num_slots"] * promised_tokens(values["max_tokens"])
    return EngineInfo(**{"capacity_tokens": capacity_tokens, **values})


class Listener(Actor):
    """Stands in for a recipe: what came, per request, with every break of the rules noted."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, End] = {}
        self.cached: dict[str, int] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.wrongs: list[str] = []
        self._is_over: dict[str, asyncio.Event] = {}

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RECIPE_TOKENS: self._on_tokens}

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        ends, cached, said, start = dict(emitted.ends), dict(emitted.cached), dict(emitted.logprobs), 0
        for i, request_id in enumerate(emitted.request_ids):
            known = self.tokens.setdefault(request_id, [])
            if emitted.first_indexes[i] != len(known):
                self.wrongs.append(f"{request_id}: index {emitted.first_indexes[i]} after {len(known)} tokens")
            if request_id in self.ends:
                self.wrongs.append(f"{request_id}: something after the end")
            if i in cached:
                self.cached[request_id] = cached[i]
            if i in said:
                self.logprobs.setdefault(request_id, []).append(said[i])
            known.extend(emitted.tokens[start : start + emitted.counts[i]])
            start += emitted.counts[i]
            if i in ends:
                end = ends[i]
                assert not isinstance(end, Preempted), "clients hear nothing of that"
                self.ends[request_id] = end
                self.over(request_id).set()
        return Taken()

    def reset(self, request_id: str) -> None:
        """Forget a request, so that its id can be used again."""
        for known in (self.tokens, self.ends, self._is_over):
            known.pop(request_id, None)

    def over(self, request_id: str) -> asyncio.Event:
        return self._is_over.setdefault(request_id, asyncio.Event())


class Core(World):
    """The actors of a small system, and what a client does with it."""

    async def with_prefill(self, id: str, cost: StepCost | None = None, **fields: Any) -> None:
        await self.add_prefill(id, TimedEngine(info(**fields), VOCABULARY, cost))

    async def with_decode(self, id: str, cost: StepCost | None = None, **fields: Any) -> None:
        await self.add_decode(id, TimedEngine(info(**fields), VOCABULARY, cost, most_accepted=3))

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
            elif isinstance(actor, Balancer):
                held[name] = actor.ledger.num_reserved
        for name, bulk in self.bulks.items():
            held[f"bulk of {name}"] = bulk.num_offers
        return held


@asynccontextmanager
async def core(
    num_prefill: int = 1, num_decode: int = 1, cost: StepCost | None = None, broker: RecordingBroker | None = None
) -> AsyncIterator[Core]:
    """A running system; whatever a test does in it, no rule of the token stream may have been broken."""
    system = Core(0, broker)
    try:
        await system.add(Listener("rc0", await system.bus("recipe/rc0")))
        await system.add_balancers()
        for index in range(num_prefill):
            await system.with_prefill(f"p{index}", cost)
        for index in range(num_decode):
            await system.with_decode(f"d{index}", cost)
        await system.add_entrypoint("e0")
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
