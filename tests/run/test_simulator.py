"""The whole stack on the memory bus under a virtual clock: one seed, one history."""

from __future__ import annotations

import asyncio
import json

from actors.recipe.card import ModelCard
from bus.bus import Bus, Delivery
from bus.subjects import INBOX_PREFIX, api
from kernels.timed import StepCost
from run.settings import DEFAULT_MODEL
from run.simulator import RecordingBroker, World, engine_for
from run.virtual import run_virtual
from schemas.api import Protocol

COST = StepCost(step_ns=12_000_000, prefill_token_ns=300_000, decode_row_ns=250_000)


async def chat(bus: Bus, name: str, body: dict[str, object]) -> list[dict[str, object]]:
    """One public request of a client that knows only NATS; its events."""
    events: list[dict[str, object]] = []
    is_over = asyncio.Event()

    def on_delivery(delivery: Delivery) -> None:
        if delivery.body:
            events.append(json.loads(delivery.body))
        else:
            is_over.set()

    reply = f"{INBOX_PREFIX}client.{name}"
    unsubscribe = await bus.wire.subscribe(reply, on_delivery)
    await bus.wire.publish(api(Protocol.CHAT_COMPLETIONS), json.dumps(body).encode(), reply=reply)
    await is_over.wait()
    await unsubscribe()
    return events


async def story(seed: int) -> tuple[str, int, list[int]]:
    """A small day of a small system: clients come at random times, a worker is killed. Its history."""
    broker = RecordingBroker()
    world = World(seed, broker)
    card = ModelCard.from_folder(DEFAULT_MODEL)
    await world.add_balancers()
    for id in ("p0", "p1"):
        await world.add_prefill(id, engine_for(card, 2048, COST))
    for id in ("d0", "d1"):
        await world.add_decode(id, engine_for(card, 2048, COST))
    await world.add_entrypoint("e0")
    await world.add_recipe("r0", card)
    client = await world.bus("client")

    async def come(i: int) -> int:
        await asyncio.sleep(world.random.expovariate(5.0))
        content = "word " * world.random.choice((world.random.randrange(1, 200), 2000))  # some need a thread
        body: dict[str, object] = {
            "model": card.name,
            "stream": i % 2 == 0,
            "max_tokens": 40,
            "messages": [{"role": "user", "content": content}],
        }
        return len(await chat(client, f"c{i}", body))

    clients = [asyncio.create_task(come(i)) for i in range(24)]
    await asyncio.sleep(0.5)
    world.kill("decode/d1")
    lengths = await asyncio.gather(*clients)
    await asyncio.sleep(60.0)
    await world.stop()
    return broker.history, broker.num_messages, lengths


def test_one_seed_gives_one_history() -> None:
    first, again, other = (run_virtual(story(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != other[0]
    assert first[1] > 500 and all(length >= 1 for length in first[2])
