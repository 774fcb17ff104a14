"""What only the NATS wire promises: bounds, reconnecting, typed failures."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from urllib.parse import urlparse

import pytest
from nats.aio.client import Server

from bus.broker import NatsWire, _choose_server
from bus.bus import BusError, Delivery
from bus.server import EmbeddedServer, ServerConfig
from schemas.failure import Code
from tests.conftest import Run

pytestmark = pytest.mark.nats


async def internal(config: ServerConfig, name: str = "test") -> NatsWire:
    return await NatsWire.connect(config.url(config.internal), name=name)


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


def test_a_broker_that_stands_still_holds_publishers_back_and_loses_nothing(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NatsWire.flush, "__kwdefaults__", {"timeout_s": 0.05})

    async def main() -> None:
        server = EmbeddedServer(ServerConfig.write(tmp_path / "state", port=0))
        await server.start()
        wire = await internal(server.config)
        sizes: list[int] = []
        await wire.subscribe("still", lambda d: sizes.append(len(d.body)))
        await wire.flush(timeout_s=10)
        assert server._process is not None
        server._process.send_signal(signal.SIGSTOP)
        for i in range(16):  # more than sockets hold
            await wire.publish("still", bytes(1_000_000 + i))
        assert sizes == []
        server._process.send_signal(signal.SIGCONT)
        await wire.flush(timeout_s=10)
        assert sizes == [1_000_000 + i for i in range(16)]
        await wire.close()
        await server.stop()

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
        assert source.away_s == 0.0
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
        missing: list[str] = []
        await source.subscribe(f"{source.inbox}.m.*", lambda d: missing.append(d.subject) if d.is_missing else None)
        await source.publish("again.nobody", b"", reply=f"{source.inbox}.m.soon")
        await source.flush()
        away_s = source.away_s
        await asyncio.sleep(0.02)
        assert 0 < away_s < source.away_s, "others may still be"
        source._client.settled_s = asyncio.get_running_loop().time()  # as if the time to settle had passed
        away_s = source.away_s
        await asyncio.sleep(0.02)
        assert source.away_s == away_s
        await source.publish("again.nobody", b"", reply=f"{source.inbox}.m.later")
        await source.flush()
        assert missing == [f"{source.inbox}.m.later"], "right after a reconnect others may still be on their way"
        await unsubscribe()
        await source.close()
        await listener.close()
        await server.stop()

    run_async(main())


def test_waits_before_a_reconnect_have_jitter() -> None:
    """And grow up to a bound: a broker that restarts is not called by all at once."""
    server = Server(uri=urlparse("nats://localhost"))
    for server.reconnects, most_s in ((0, 0.05), (3, 0.4), (50, 2.0)):
        waits = {_choose_server([server], {})[1] for _ in range(100)}
        assert len(waits) > 90 and most_s / 2 <= min(waits) < 0.6 * most_s and 0.9 * most_s < max(waits) <= most_s


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


def test_a_close_that_its_own_connection_cuts_short_is_a_close(
    run_async: Run, nats_server: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py cancels itself when the connection breaks while it closes."""

    async def main() -> None:
        wire = await internal(nats_server)
        close = wire._client.close

        async def cut_short() -> None:
            await close()
            raise asyncio.CancelledError

        monkeypatch.setattr(wire._client, "close", cut_short)
        await wire.close()
        assert wire._client.is_closed

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
