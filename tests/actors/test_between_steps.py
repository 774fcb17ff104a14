"""Between two steps of decode: what it still does for a client that has left, and what it does not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from actors.decode.actor import Decode
from actors.recipe.card import ModelCard
from bus.subjects import RECIPE_CANCEL
from kernels.timed import StepCost, TimedEngine
from run.simulator import World
from run.virtual import run_virtual
from schemas.api import Protocol
from schemas.request import Cancel, CancelReason
from tests.actors.bodies import CHAT, body
from tests.actors.builders import submit
from tests.actors.core import core, info
from tests.actors.edge import Inbox

STEP_S = 0.01
VOCABULARY = range(300, 1000)


class Counting(TimedEngine):
    """Notes when each step begins, and for whom."""

    def __init__(self) -> None:
        sizes = info(vocab_size=1024, max_tokens=2048)
        super().__init__(sizes, VOCABULARY, StepCost(step_ns=int(STEP_S * 1e9)), most_accepted=3)
        self.begun: list[tuple[float, list[str]]] = []
        self.freed: dict[str, float] = {}

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        self.begun.append((asyncio.get_running_loop().time(), list(keys)))
        return await super().decode(keys)

    def free(self, key: str) -> None:
        self.freed[key] = asyncio.get_running_loop().time()
        super().free(key)


@asynccontextmanager
async def service(card: ModelCard) -> AsyncIterator[tuple[World, Counting]]:
    world, engine = World(0), Counting()
    try:
        await world.add_balancers()
        await world.add_prefill("p0", TimedEngine(info(vocab_size=1024, max_tokens=2048), VOCABULARY))
        await world.add_decode("d0", engine)
        await world.add_entrypoint("e0")
        await world.add_recipe("rc0", card)
        yield world, engine
    finally:
        await world.stop()


@pytest.mark.parametrize("how", ["nats cancel", "nats gone", "gateway"])
@pytest.mark.parametrize("into_step", [0.0, 0.5, 0.99])
def test_no_step_begins_for_who_left(card: ModelCard, how: str, into_step: float) -> None:
    """A client of NATS that cancels, or that has only left: then tokens of one more step find nobody. A gateway whose
    client hung up, or closed its SDK's stream, tells the recipe."""

    async def main() -> None:
        async with service(card) as (world, engine):
            leaving, staying = await Inbox.open(world.broker), await Inbox.open(world.broker)
            for client in (leaving, staying):
                await client.send(CHAT, body(CHAT, stream=True, max_tokens=150))
                await client.next()
            for _ in range(9):
                await leaving.next()
            left = engine.begun[0][1][0]
            await asyncio.sleep(into_step * STEP_S)
            left_s = asyncio.get_running_loop().time()
            if how == "nats cancel":
                other = await Inbox.open(world.broker)
                await other.send(Protocol.CANCEL, {"id": left})
                await other.next()
            elif how == "nats gone":
                leaving.wire.cut()
            else:
                bus = await world.bus("gateway/g0")
                cancel = Cancel(request_id=left, reason=CancelReason.CLIENT_GONE)
                await bus.ask(RECIPE_CANCEL.at("rc0"), cancel, timeout_s=1)
            assert (await staying.all())[-1]["choices"][0]["finish_reason"] == "length"
            late = [begun_s for begun_s, keys in engine.begun if left in keys and begun_s > left_s]
            assert len(late) <= (1 if how == "nats gone" else 0)
            assert engine.freed[left] - left_s <= (1 + len(late)) * STEP_S + 1e-6

    run_virtual(main())


def test_a_step_begins_before_what_the_last_one_gave_is_told() -> None:
    """Its requests are all that it needs to know, and the engine does not wait for the rest."""

    class Watching(TimedEngine):
        decode_actor: Decode
        untold: list[bool] = []

        async def decode(self, keys: Sequence[str]) -> list[list[int]]:
            self.untold.append(bool(self.decode_actor._telling._untold))
            return await super().decode(keys)

    async def main() -> None:
        async with core(num_decode=0) as system:
            engine = Watching(info(), range(100, 1000), StepCost(step_ns=int(STEP_S * 1e9)))
            await system.add_decode("d0", engine)
            actor = system.actors["decode/d0"]
            assert isinstance(actor, Decode)
            engine.decode_actor = actor
            tokens, _ = await system.finish(submit("r1", max_tokens=9))
            assert len(tokens) == 9 and engine.untold == [False] + [True] * 8

    run_virtual(main())
