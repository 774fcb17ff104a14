"""A recipe on a real broker, and a client that chooses reply subjects to do harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.recipe.actor import Recipe
from actors.recipe.card import ModelCard
from actors.rules.tenants import Tenants
from bus.broker import NatsWire
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, Delivery
from bus.server import ServerConfig
from bus.subjects import RESEND, api
from schemas.api import Protocol
from schemas.request import Resend, TokensEmitted
from tests.bus.test_client_user import Stranger
from tests.conftest import Run

pytestmark = pytest.mark.nats
TIMEOUT_S = 10.0
NOTHING = TokensEmitted(source="", request_ids=[], epochs=[], first_indexes=[], counts=[], tokens=[])


@asynccontextmanager
async def recipe_on(server: ServerConfig, card: ModelCard) -> AsyncIterator[Bus]:
    """The bus of a recipe that runs."""
    bus = Bus(await NatsWire.connect(server.url(server.internal), name="front"))
    await bus.open()
    is_ready = asyncio.Event()
    task = asyncio.create_task(Recipe("rc0", bus, MemoryBulk(MemoryHub()), card, Tenants()).run(is_ready.set))
    await is_ready.wait()
    try:
        yield bus
    finally:
        task.cancel()
        await asyncio.wait([task])
        await bus.close()


def test_a_client_cannot_answer_our_asks(run_async: Run, nats_server: ServerConfig, card: ModelCard) -> None:
    async def main() -> None:
        user = nats_server.clients[0]
        async with recipe_on(nats_server, card) as bus:
            stranger = await Stranger.connect(nats_server, user)
            own = await stranger.client.subscribe(f"{user.inbox_prefix}.r1")
            await stranger.client.publish(api(Protocol.CHAT_COMPLETIONS), b'{"model":"no"}', reply=own.subject)
            event: Any = await own.next_msg(timeout=TIMEOUT_S)
            ours = event.reply.rpartition(".")[0]
            assert ours == bus.wire.inbox, "a client sees where we listen"
            assert (await own.next_msg(timeout=TIMEOUT_S)).data == b""

            asked: asyncio.Queue[Delivery] = asyncio.Queue()
            await bus.wire.subscribe(RESEND.at("e0").name, asked.put_nowait)
            question = Resend(request_ids=[], first_indexes=[], epochs=[])
            asking = asyncio.create_task(bus.ask(RESEND.at("e0"), question, timeout_s=TIMEOUT_S))
            reply = (await asked.get()).reply
            await stranger.client.publish(reply, b"harm")
            assert await stranger.is_refused(reply)
            for protocol in Protocol:
                await stranger.client.publish(api(protocol), b"", reply=reply)
            await stranger.client.publish("$SRV.PING", b"", reply=reply)
            await stranger.client.publish(api(Protocol.MODELS), b"", reply=own.subject)
            assert json.loads((await own.next_msg(timeout=TIMEOUT_S)).data)["object"] == "list"
            await bus.wire.flush()
            assert not asking.done()
            await bus.answer(reply, NOTHING)
            assert await asking == NOTHING
            await stranger.client.close()

    run_async(main())


def test_tenants_are_answered_each_in_its_own_inbox(run_async: Run, nats_server: ServerConfig, card: ModelCard) -> None:
    """A real broker, a real recipe: a request gets its answer, and nobody else's answer can be led there."""

    async def main() -> None:
        async with recipe_on(nats_server, card):
            users = [*nats_server.tenants, nats_server.clients[0]]
            strangers = [await Stranger.connect(nats_server, user) for user in users]
            inboxes = [
                await stranger.client.subscribe(f"{user.inbox_prefix}.>")
                for stranger, user in zip(strangers, users, strict=True)
            ]
            for stranger in strangers:
                await stranger.settle()
            for stranger, user in zip(strangers, users, strict=True):
                for other in users:
                    subject = api(Protocol.MODELS, user.tenant)
                    await stranger.client.publish(subject, b"", reply=f"{other.inbox_prefix}.{user.user}")
                answer = await stranger.client.request(api(Protocol.MODELS, user.tenant), b"", timeout=TIMEOUT_S)
                assert json.loads(answer.data)["object"] == "list"
            for stranger, inbox, user in zip(strangers, inboxes, users, strict=True):
                await stranger.settle()
                while inbox.pending_msgs:
                    message: Any = await inbox.next_msg(timeout=TIMEOUT_S)
                    assert message.subject.startswith(f"{user.inbox_prefix}.")
                    assert message.subject.rpartition(".")[2] not in {u.user for u in users if u is not user}
                await stranger.client.close()

    run_async(main())


def test_a_long_reply_does_not_cost_our_connection(run_async: Run, nats_server: ServerConfig, card: ModelCard) -> None:
    async def main() -> None:
        user = nats_server.clients[0]
        async with recipe_on(nats_server, card) as bus:
            stranger = await Stranger.connect(nats_server, user)
            for length in (300, 4040, 4065):
                reply = f"{user.inbox_prefix}.".ljust(length, "a")
                for protocol in Protocol:
                    await stranger.client.publish(api(protocol), b"{}", reply=reply)
            own = await stranger.client.subscribe(f"{user.inbox_prefix}.".ljust(256, "a"))
            await stranger.client.publish(api(Protocol.MODELS), b"", reply=own.subject)
            assert json.loads((await own.next_msg(timeout=TIMEOUT_S)).data)["object"] == "list"
            assert isinstance(bus.wire, NatsWire) and bus.wire.num_reconnects == 0
            await stranger.client.close()

    run_async(main())
