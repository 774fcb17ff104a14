"""`shoal bench bus`: what a typed message between actors costs, beside raw nats-py on the same server."""

from __future__ import annotations

import asyncio
import json as json_module
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from bus.actor import Actor, Envelope, Handler
from bus.broker import NatsWire
from bus.bus import Bus
from bus.server import EmbeddedServer, ServerConfig
from bus.subjects import RELEASE_DECODE, Subject, ping
from schemas.liveness import Ping, Pong
from schemas.message import Role
from schemas.routing import Release

NUM_ROUNDS = 9
NUM_ASKS = 400
NUM_TELLS = 10_000

_encode = msgspec.msgpack.encode


class _Counter(Actor):
    """Answers pings, as every actor does, and counts what it is told."""

    role = Role.DECODE_BALANCER
    mailbox_limit = 2 * NUM_TELLS

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.num_told = 0
        self.all_told = asyncio.Event()

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RELEASE_DECODE: self._on_release}

    async def _on_release(self, message: Release, envelope: Envelope) -> None:
        self.num_told += 1
        if self.num_told % NUM_TELLS == 0:
            self.all_told.set()


class _Ours:
    """From a bus on one connection to an actor on another: typing, mailbox, deadlines, trace context."""

    def __init__(self, sender: Bus, counter: _Counter) -> None:
        self._sender = sender
        self._counter = counter
        self._running: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: ServerConfig) -> _Ours:
        """Connect both ends and start the actor."""
        url = config.url(config.internal)
        sender, receiver = [Bus(await NatsWire.connect(url, name=name)) for name in ("sender", "receiver")]
        await sender.open()
        await receiver.open()
        ours = cls(sender, _Counter("counter", receiver))
        ready = asyncio.Event()
        ours._running = asyncio.create_task(ours._counter.run(ready.set))
        await ready.wait()
        return ours

    async def ask(self) -> None:
        """Ask, wait for the answer, ask again."""
        address = ping(self._counter.role).at(self._counter.id)
        for _ in range(NUM_ASKS):
            await self._sender.ask(address, Ping(), timeout_s=5)

    async def tell(self) -> None:
        """Tell as fast as possible, until the actor has handled it all."""
        address = RELEASE_DECODE.at(self._counter.id)
        self._counter.all_told.clear()
        for i in range(NUM_TELLS):
            await self._sender.tell(address, Release(reservation=i))
        await self._counter.all_told.wait()

    async def stop(self) -> None:
        """Stop the actor and close both ends."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._sender.close()
        await self._counter.bus.close()


class Raw:
    """The same bytes with nats-py alone."""

    def __init__(self, sender: Client, receiver: Client) -> None:
        self._sender = sender
        self._receiver = receiver
        self._num_told = 0
        self._all_told = asyncio.Event()
        self._answer = _encode(Pong(role=Role.DECODE_BALANCER, id="counter", incarnation="00000000", num_queued=0))

    @classmethod
    async def start(cls, config: ServerConfig) -> Raw:
        """Connect both ends and listen."""
        url = config.url(config.internal)
        raw = cls(await nats.connect(url), await nats.connect(url))
        await raw._receiver.subscribe("shoal.raw.ask", cb=raw._on_ask)
        await raw._receiver.subscribe("shoal.raw.tell", cb=raw._on_tell)
        await raw._receiver.flush()
        return raw

    async def ask(self) -> None:
        """As `_Ours.ask`, with `request`."""
        question = _encode(Ping())
        for _ in range(NUM_ASKS):
            await self._sender.request("shoal.raw.ask", question, timeout=5)

    async def tell(self) -> None:
        """As `_Ours.tell`, with `publish` of one body."""
        body = _encode(Release(reservation=NUM_TELLS))
        self._all_told.clear()
        for _ in range(NUM_TELLS):
            await self._sender.publish("shoal.raw.tell", body)
        await self._all_told.wait()

    async def stop(self) -> None:
        """Close both ends."""
        await self._sender.close()
        await self._receiver.close()

    async def _on_ask(self, message: Msg) -> None:
        await message.respond(self._answer)

    async def _on_tell(self, message: Msg) -> None:
        self._num_told += 1
        if self._num_told % NUM_TELLS == 0:
            self._all_told.set()


async def _measure(folder: Path) -> dict[str, float]:
    server = EmbeddedServer(ServerConfig.write(folder, port=0))
    await server.start()
    ours, raw = await _Ours.start(server.config), await Raw.start(server.config)
    rounds: dict[str, tuple[Callable[[], Awaitable[None]], list[float]]] = {
        "ask": (ours.ask, []),
        "raw_ask": (raw.ask, []),
        "tell": (ours.tell, []),
        "raw_tell": (raw.tell, []),
    }
    try:
        # Interleaved, and the medians compared: other work on the machine then hits both alike. The first is a warm-up.
        for i in range(NUM_ROUNDS + 1):
            for work, seconds in rounds.values():
                start = time.perf_counter()
                await work()
                if i > 0:
                    seconds.append(time.perf_counter() - start)
    finally:
        await ours.stop()
        await raw.stop()
        await server.stop()
    median = {name: statistics.median(seconds) for name, (_, seconds) in rounds.items()}
    return {
        "ask_us": round(median["ask"] / NUM_ASKS * 1e6, 1),
        "raw_ask_us": round(median["raw_ask"] / NUM_ASKS * 1e6, 1),
        "ask_ratio": round(median["ask"] / median["raw_ask"], 3),
        "tell_per_s": round(NUM_TELLS / median["tell"]),
        "raw_tell_per_s": round(NUM_TELLS / median["raw_tell"]),
        "tell_ratio": round(median["raw_tell"] / median["tell"], 3),
    }


def bench_bus(*, json: bool = False) -> None:
    """Measure and print: ask round trip (aim: at most 1.2 × raw) and tell throughput (aim: at least 0.8 × raw)."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        found = uvloop.run(_measure(Path(folder)))
    if json:
        print(json_module.dumps(found))
        return
    print(f"ask   {found['ask_us']:9.1f} µs   raw {found['raw_ask_us']:9.1f} µs   × {found['ask_ratio']:.2f}")
    print(f"tell  {found['tell_per_s']:9.0f} /s   raw {found['raw_tell_per_s']:9.0f} /s   × {found['tell_ratio']:.2f}")
