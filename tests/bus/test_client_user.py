"""What strangers can do on a real server: little, and nothing that harms; and what they can find out."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client

from bus.broker import NatsWire
from bus.bus import Bus, BusError, Delivery
from bus.server import ServerConfig, User
from bus.subjects import Address, ping
from schemas.failure import Code
from schemas.liveness import Ping
from tests.conftest import Run

pytestmark = pytest.mark.nats


async def internal(config: ServerConfig, name: str = "test") -> NatsWire:
    return await NatsWire.connect(config.url(config.internal), name=name)


class Stranger:
    """A client user with plain nats-py; remembers what the broker refused it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.refusals: list[str] = []

    @classmethod
    async def connect(cls, config: ServerConfig, user: User) -> Stranger:
        stranger = cls(Client())

        async def on_error(error: Exception) -> None:
            stranger.refusals.append(str(error).lower())

        await stranger.client.connect(config.url(user), inbox_prefix=user.inbox_prefix, error_cb=on_error)
        return stranger

    async def settle(self) -> None:
        """Return when the broker has seen all we did: nats-py's flush overtakes what waits to be written, once."""
        await self.client.flush()
        await self.client.flush()

    async def is_refused(self, what: str) -> bool:
        """Did the broker refuse what was just done, naming this?"""
        await self.settle()
        found = any("permissions violation" in refusal and what.lower() in refusal for refusal in self.refusals)
        self.refusals.clear()
        return found


def test_a_client_user_may_ask_the_api_and_read_its_own_inbox(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        wire = await internal(nats_server)
        stranger = await Stranger.connect(nats_server, nats_server.clients[0])
        answers: set[asyncio.Future[Any]] = set()

        def on_delivery(delivery: Delivery) -> None:
            answers.add(asyncio.ensure_future(wire.publish(delivery.reply, b"hello " + delivery.body)))

        await wire.subscribe("shoal.api.*", on_delivery, queue="q")
        await wire.flush()
        reply = await stranger.client.request("shoal.api.chat_completions", b"you", timeout=10)
        assert reply.data == b"hello you"
        await asyncio.gather(*answers)
        await stranger.client.close()
        await wire.close()

    run_async(main())


def test_a_client_user_cannot_reach_anything_else(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        wire = await internal(nats_server)
        heard: list[Delivery] = []
        await wire.subscribe("shoal.entrypoint.>", heard.append)
        await wire.subscribe("_INBOX.>", heard.append)
        await wire.flush()
        mine, other = nats_server.clients
        stranger = await Stranger.connect(nats_server, mine)
        for subject in ("shoal.entrypoint.any.cancel", f"{other.inbox_prefix}.x", f"{wire.inbox}.1", "$JS.API.INFO"):
            await stranger.client.publish(subject, b"!")
            assert await stranger.is_refused(subject), f"publishing to {subject}"
        inboxes = ("_INBOX.>", "_INBOX.*.*", f"{other.inbox_prefix}.>", f"{wire.inbox}.*")
        for subject in (">", "shoal.>", "shoal.api.>", *inboxes):
            await stranger.client.subscribe(subject)
            assert await stranger.is_refused(subject), f"listening on {subject}"
        await wire.flush()
        assert [d for d in heard if d.body == b"!"] == []
        await stranger.client.close()
        await wire.close()

    run_async(main())


def test_one_client_does_not_hear_what_another_gets(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        wire = await internal(nats_server)
        strangers = [await Stranger.connect(nats_server, user) for user in nats_server.clients]
        inboxes = [
            await stranger.client.subscribe(f"{user.inbox_prefix}.>")
            for stranger, user in zip(strangers, nats_server.clients, strict=True)
        ]
        for stranger in strangers:
            await stranger.settle()
        await wire.publish(f"{nats_server.clients[0].inbox_prefix}.s1", b"secret")
        await wire.flush()
        for stranger in strangers:
            await stranger.settle()
        assert (await inboxes[0].next_msg(timeout=10)).data == b"secret"
        assert inboxes[1].pending_msgs == 0
        for stranger in strangers:
            await stranger.client.close()
        await wire.close()

    run_async(main())


def test_a_tenants_user_is_that_tenant_and_no_other(run_async: Run, nats_server: ServerConfig) -> None:
    """It publishes on its own subjects only, however they are spelt, and hears its own inbox only."""

    async def main() -> None:
        wire = await internal(nats_server)
        heard: list[Delivery] = []
        for subject in ("shoal.api.messages", "shoal.api.*.messages", "shoal.recipe.>", "_INBOX.>", "$SRV.>"):
            await wire.subscribe(subject, heard.append)
        await wire.flush()
        acme, beta = nats_server.tenants
        plain = nats_server.clients[0]
        user = await Stranger.connect(nats_server, acme)
        for subject in (
            *("shoal.api.beta.messages", "shoal.api.messages", "shoal.api.public.messages", "shoal.api.a.b.messages"),
            *("shoal.api.*.messages", "shoal.api.>", "shoal.api.acme", "shoal.recipe.any.call", "$SRV.PING"),
            *("shoal.api.ACME.messages", "shoal.api.acme.messages.x", "shoal.api.acme-2.messages"),
            *(f"{beta.inbox_prefix}.r", f"{plain.inbox_prefix}.r"),
        ):
            await user.client.publish(subject, b"!")
            assert await user.is_refused(subject), f"publishing to {subject}"
        for subject in (">", "shoal.api.acme.*", "_INBOX.tenant.*.>", f"{beta.inbox_prefix}.>", "_INBOX.tenant.acme"):
            await user.client.subscribe(subject)
            assert await user.is_refused(subject), f"listening on {subject}"
        client = await Stranger.connect(nats_server, plain)
        for subject in ("shoal.api.acme.messages", "shoal.api.*.messages", f"{acme.inbox_prefix}.r"):
            await client.client.publish(subject, b"!")
            assert await client.is_refused(subject), f"publishing to {subject}"
        for subject in ("shoal.api.>", "shoal.api.*"):  # as good as any word: let through, and heard by nobody
            await client.client.publish(subject, b"!")
        await client.settle()
        await user.client.publish("shoal.api.acme.messages", b"mine")
        await user.settle()
        await wire.flush()
        assert [(delivery.subject, delivery.body) for delivery in heard] == [("shoal.api.acme.messages", b"mine")]
        for stranger in (user, client):
            await stranger.client.close()
        await wire.close()

    run_async(main())


def test_a_client_user_can_use_our_wire_within_its_prefix(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        user = nats_server.clients[0]
        wire = await NatsWire.connect(nats_server.url(user), name="client", inbox_prefix=user.inbox_prefix)
        bus = Bus(wire)
        await bus.open()
        with pytest.raises(BusError) as caught:
            await bus.ask(Address(ping("api"), "shoal.api.nothing"), Ping(), timeout_s=10)
        assert caught.value.code == Code.NO_RESPONDERS
        await bus.close()

    run_async(main())


def test_a_client_cannot_make_the_directory_answer_elsewhere(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        wire = await internal(nats_server)
        await wire.announce("recipe", "recipe-1", "0.1.0")
        heard: list[Delivery] = []
        await wire.subscribe(f"{wire.inbox}.1", heard.append)
        await wire.subscribe("shoal.entrypoint.>", heard.append)
        user = nats_server.clients[0]
        stranger = await Stranger.connect(nats_server, user)
        own = await stranger.client.subscribe(f"{user.inbox_prefix}.srv")
        long = f"{user.inbox_prefix}.{'a' * 4030}"
        for reply in (f"{wire.inbox}.1", "shoal.entrypoint.any.cancel", long, f"{user.inbox_prefix}.srv"):
            await stranger.client.publish("$SRV.PING", b"", reply=reply)
        assert msgspec.json.decode((await own.next_msg(timeout=10)).data)["id"] == "recipe-1"
        await wire.flush()
        assert heard == []
        assert wire.num_reconnects == 0
        await stranger.client.close()
        await wire.close()

    run_async(main())


def test_bytes_a_client_makes_up_do_not_deafen_the_wire(
    run_async: Run, nats_server: ServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of these ends the read loop of plain nats-py 2.16: the subscription is deaf until pings time out."""

    def hpub(headers: bytes, body: bytes) -> bytes:
        return b"HPUB shoal.api.x %d %d\r\n" % (len(headers), len(headers) + len(body)) + headers + body + b"\r\n"

    async def main() -> None:
        wire = await internal(nats_server)
        heard: list[Delivery] = []
        await wire.subscribe("shoal.api.*", heard.append)
        await wire.flush()
        stranger = await Stranger.connect(nats_server, nats_server.clients[0])
        for command in (
            b"PUB shoal.api.\xff 1\r\n1\r\n",
            b"PUB shoal.api.x \xff\xfe 1\r\n2\r\n",
            hpub(b"NATS/1.0 \xff\xff\xff\r\n\r\n", b"3"),
            hpub(b"NATS/1.0\r\n\xff\xfe: \xc3\x28:\r\n\r\n", b"4"),
            hpub(b"NATS/1.0\r\n\r\n", b"5"),
            b"PUB shoal.api.x 1\r\n6\r\n",
        ):
            await stranger.client._send_command(command)
            await stranger.client._flush_pending()
        await stranger.settle()
        await wire.flush()
        assert [d.body for d in heard] == [b"3", b"4", b"5", b"6"]
        assert all(not d.is_missing for d in heard)
        await stranger.client.close()
        await wire.close()

    run_async(main())
    assert "not UTF-8" in caplog.text


def test_services_are_discoverable(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        wire = await internal(nats_server)
        for role, id in (("recipe", "recipe-1"), ("recipe", "recipe-2"), ("decode", "decode-1")):
            await wire.announce(role, id, "0.1.0")
        stranger = await Stranger.connect(nats_server, nats_server.clients[0])
        inbox = await stranger.client.subscribe(f"{nats_server.clients[0].inbox_prefix}.srv")
        seen: dict[str, list[dict[str, Any]]] = {}
        for subject in ("$SRV.PING", "$SRV.INFO.shoal-recipe", "$SRV.STATS.shoal-recipe.recipe-2", "$SRV.NONE"):
            await stranger.client.publish(subject, b"", reply=f"{nats_server.clients[0].inbox_prefix}.srv")
            await stranger.settle()
            await wire.flush()
            await wire.flush()
            await stranger.settle()
            seen[subject] = [msgspec.json.decode((await inbox.next_msg()).data) for _ in range(inbox.pending_msgs)]
        assert [(s["name"], s["id"]) for s in seen["$SRV.PING"]] == [
            ("shoal-recipe", "recipe-1"),
            ("shoal-recipe", "recipe-2"),
            ("shoal-decode", "decode-1"),
        ]
        assert [s["id"] for s in seen["$SRV.INFO.shoal-recipe"]] == ["recipe-1", "recipe-2"]
        assert all(s["metadata"] == {"role": "recipe", "id": s["id"]} for s in seen["$SRV.INFO.shoal-recipe"])
        (stats,) = seen["$SRV.STATS.shoal-recipe.recipe-2"]
        assert (stats["type"], stats["version"]) == ("io.nats.micro.v1.stats_response", "0.1.0")
        assert seen["$SRV.NONE"] == []
        with pytest.raises(nats.errors.NoRespondersError):
            await stranger.client.request("$SRV.PING.shoal-nobody", timeout=10)
        await stranger.client.close()
        await wire.close()

    run_async(main())
