"""HTTP clients that do not read what they asked for: bounded, cancelled by name, and a burden to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest

from actors.gateway import asgi
from actors.recipe.card import ModelCard
from schemas.request import CancelReason
from tests.actors.clients import CHAT_PATH
from tests.actors.edge import BODY, STOP, Edge, content, silent, submitted
from tests.conftest import Run

CAP_BYTES = 64 * 1024
TOKENS = [token % 700 + 300 for token in range(1000)]


class Stalled:
    """A connection that asks, and reads only when told to. The kernel holds little for it."""

    def __init__(self, system: Edge, *, stream: bool = True, kernel_bytes: int = 32 * 1024) -> None:
        assert system.gateway._server is not None
        for listener in system.gateway._server.servers[0].sockets:  # what it accepts has the same
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel_bytes)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_bytes)
        self.socket.connect(("127.0.0.1", system.gateway.port))
        payload = json.dumps({**BODY, "stream": stream}).encode()
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
        self.socket.sendall(head.encode() + payload)
        self.socket.setblocking(False)

    async def read(self) -> bytes:
        """All that comes until the end, however it ends."""
        loop, parts = asyncio.get_running_loop(), []
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):  # it is cut off: what came before counts
                while part := await loop.sock_recv(self.socket, 1 << 20):
                    parts.append(part)
        self.socket.close()
        return b"".join(parts)


async def flood(system: Edge, slow: str, other: str) -> int:
    """Tokens for both until the first is cancelled. The most bytes that were held for a stream."""
    entrypoint, held = system.entrypoint, 0
    async with asyncio.timeout(20):
        while slow not in entrypoint.cancelled:
            for id in (slow, other):
                await entrypoint.emit(id, TOKENS)
            await asyncio.sleep(0.001)
            held = max(held, *(exchange.stream.num_bytes for exchange in system.gateway._exchanges.values()))
    return held


def events_of(response: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.split(b"\n") if line.startswith(b"data: {")]


def test_a_stalled_reader_is_cancelled_and_slows_nobody(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.stream.MAX_BUFFERED_BYTES", CAP_BYTES)

    async def main() -> None:
        async with silent(card) as system:
            stalled = Stalled(system)
            [slow] = await submitted(system.entrypoint)
            reading = asyncio.create_task(Stalled(system, kernel_bytes=1 << 20).read())
            other = (await submitted(system.entrypoint, 2))[1]
            assert 0 < await flood(system, slow, other) <= CAP_BYTES
            assert system.entrypoint.cancelled[slow].reason is CancelReason.CLIENT_TOO_SLOW
            await system.entrypoint.emit(other, [], STOP)
            events = events_of(await reading)
            assert events[-1]["usage"]["completion_tokens"] == len(system.entrypoint.held[other][0])
            # It comes back: what it was sent before is in order, and then it hears why there is no more.
            late = events_of(await stalled.read())
            assert late.pop()["error"]["code"] == "client_too_slow"
            assert content(late) and content(events).startswith(content(late))

    run_async(main())


@pytest.mark.parametrize("stream", [True, False])
def test_who_never_reads_again_is_cut_off(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Nothing is kept for it: neither what is left of a stream, nor of an answer in one piece."""

    async def main() -> None:
        async with silent(card) as system:
            stalled = Stalled(system, stream=stream)
            [slow] = await submitted(system.entrypoint)
            for _ in range(20):
                await system.entrypoint.emit(slow, TOKENS)
            monkeypatch.setattr(asgi, "SEND_S", 0.2)
            await system.entrypoint.emit(slow, [], STOP)
            assert system.gateway._server is not None
            connections = system.gateway._server.server_state.connections
            async with asyncio.timeout(20):
                while connections or system.gateway._exchanges:
                    await asyncio.sleep(0.01)
            assert not (await stalled.read()).endswith((b"[DONE]\n\n", b"}"))

    run_async(main())
