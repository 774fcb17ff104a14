"""What only the NATS wire promises: permissions, hostile bytes, reconnecting, discovery."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client

from bus.broker import NatsWire
from bus.bus import Bus, BusError, Delivery
from bus.server import EmbeddedServer, ServerConfig, User
from bus.subjects import ping
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


def test_a_client_user_can_use_our_wire_within_its_prefix(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        user = nats_server.clients[0]
        wire = await NatsWire.connect(nats_server.url(user), name="client", inbox_prefix=user.inbox_prefix)
        bus = Bus(wire)
        await bus.open()
        with pytest.raises(BusError) as caught:
            await bus.ask(ping("api").any(), Ping(), timeout_s=10)
        assert caught.value.code == Code.NO_RESPONDERS
        await bus.close()

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


def test_too_much_with_headers_does_not_cost_the_connection(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        wire = await internal(nats_server)
        heard: list[Delivery] = []
        await wire.subscribe("size.y", heard.append)
        with pytest.raises(BusError) as caught:
            await wire.publish("size.y", bytes(wire.max_payload), headers={"A": "b"})
        assert caught.value.code == Code.TOO_LARGE
        await wire.publish("size.y", b"still here")
        await wire.flush()
        assert [d.body for d in heard] == [b"still here"]
        await wire.close()

    run_async(main())


def test_a_burst_beyond_the_high_water_mark_arrives_whole(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        source, listener = await internal(nats_server), await internal(nats_server)
        sizes: list[int] = []
        await listener.subscribe("burst", lambda d: sizes.append(len(d.body)))
        await listener.flush()
        await asyncio.gather(*(source.publish("burst", bytes(200_000 + i)) for i in range(60)))
        await source.flush()
        await listener.flush()
        assert sizes == [200_000 + i for i in range(60)]
        assert source.num_dropped == 0
        await source.close()
        await listener.close()

    run_async(main())


def test_it_comes_back_with_the_server_and_hears_again(
    run_async: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "nats")

    async def main() -> None:
        server = EmbeddedServer(ServerConfig.write(tmp_path / "state", port=0))
        await server.start()
        source, listener = await internal(server.config), await internal(server.config)
        heard: list[bytes] = []
        unsubscribe = await listener.subscribe("again.x", lambda d: heard.append(d.body))
        await listener.flush()
        await server.stop()
        async with asyncio.timeout(10):
            while source._client.is_connected or listener._client.is_connected:
                await asyncio.sleep(0.01)
        await source.publish("again.x", b"while away")  # kept, but the listener may come back later than we
        for _ in range(20):
            await source.publish("again.x", bytes(1_000_000))
        assert source.num_dropped >= 1, "the buffer is bounded"
        await server.start()
        async with asyncio.timeout(20):
            while not (source.num_reconnects and listener.num_reconnects):
                await asyncio.sleep(0.01)
        await listener.flush()
        await source.flush()
        await source.publish("again.x", b"back")
        await source.flush()
        await listener.flush()
        assert heard[-1] == b"back"
        await unsubscribe()
        await source.close()
        await listener.close()
        await server.stop()

    run_async(main())


def test_closing_without_a_server_is_quick_and_quiet(
    run_async: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "nats")

    async def main() -> None:
        server = EmbeddedServer(ServerConfig.write(tmp_path / "state", port=0))
        await server.start()
        wire = await internal(server.config)
        unsubscribe = await wire.subscribe("x", lambda d: None)
        await server.stop()
        async with asyncio.timeout(10):
            await unsubscribe()
            await wire.close()
        lost = asyncio.ensure_future(wire.wait_lost())
        await asyncio.sleep(0)
        assert not lost.done(), "a close of our own is no loss"
        lost.cancel()

    run_async(main())


def test_a_connection_the_server_ends_for_good_is_reported(run_async: Run, nats_server: ServerConfig) -> None:
    async def main() -> None:
        wire = await internal(nats_server)
        await wire._client._send_command(b"PUB x 99999999\r\n")  # over max_payload: the server hangs up with -ERR
        await wire._client._flush_pending()
        async with asyncio.timeout(10):
            await wire.wait_lost()
        with pytest.raises(BusError) as caught:
            await wire.publish("x", b"")
        assert caught.value.code == Code.SHUTTING_DOWN
        await wire.close()

    run_async(main())


@pytest.mark.parametrize("url", ["nats://internal:wrong@{}", "nats://127.0.0.1:1"])
def test_a_broker_that_is_not_there_or_refuses_is_a_typed_failure(
    run_async: Run, nats_server: ServerConfig, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "nats")

    async def main() -> None:
        with pytest.raises(BusError) as caught:
            await NatsWire.connect(url.format(f"127.0.0.1:{nats_server.port}"), name="x", timeout_s=0.3)
        assert caught.value.code == Code.NO_RESPONDERS
        assert "127.0.0.1" in caught.value.failure.message
        assert "wrong" not in caught.value.failure.message, "a password in an error message"

    run_async(main())


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
