"""Bulk over TCP: owners that lie, readers that dawdle, strangers that talk nonsense."""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from bus import bulk
from bus.bulk import SocketBulk
from schemas.bulk import Handle
from tests.bus.test_bulk import MIB, TIMEOUT_S, pull_fails, started, until
from tests.conftest import Run


class Liar:
    """A bulk server that follows a script: what it writes after each request, then it hangs up or stays silent."""

    def __init__(self, *chunks: bytes, hangs_up: bool = True) -> None:
        self.chunks = chunks
        self.hangs_up = hangs_up
        self.acks: list[bytes] = []
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def serving(self, size: int, checksum: int = 0) -> AsyncIterator[Handle]:
        """A handle that leads here."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield Handle(
                address=f"tcp://{host}:{port}", key="ab" * 16, generation=1, size_bytes=size, checksum=checksum
            )
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await reader.readexactly(25)
        for chunk in self.chunks:
            writer.write(chunk)
            await writer.drain()
        if self.hangs_up:
            writer.close()
        else:
            self.acks.append(await reader.read(25))


def head(size: int, status: bytes = b"D") -> bytes:
    return status + size.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([], "closed the connection after 0 bytes"),
        ([head(100)[:5]], "closed the connection after 0 bytes"),
        ([head(100), bytes(99)], "closed the connection after 99 bytes"),
        ([head(100), bytes(50), bytes(50)], "damaged"),
        ([head(1 << 40)], "announced"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "not a bulk server"),
        ([head(1 << 40, b"R")], "not a bulk server"),
        ([head(4, b"R"), b"nope"], "nope"),
    ],
)
def test_an_owner_that_lies_or_breaks_off(run_async: Run, chunks: list[bytes], why: str) -> None:
    async def main() -> None:
        reader = SocketBulk()
        liar = Liar(*chunks)
        async with started(reader), liar.serving(100) as handle:
            assert why in (await pull_fails(reader, handle)).message
            assert liar.acks == []

    run_async(main())


def test_an_owner_that_stops_sending_costs_the_time_allowed(run_async: Run) -> None:
    async def main() -> None:
        reader = SocketBulk()
        async with started(reader), Liar(head(100), bytes(10), hangs_up=False).serving(100) as handle:
            assert "not done within 0.05 s" in (await pull_fails(reader, handle, timeout_s=0.05)).message

    run_async(main())


def test_a_cancelled_pull_leaves_the_offer_to_its_lease(run_async: Run) -> None:
    async def main() -> None:
        owner, reader = SocketBulk(), SocketBulk()
        async with started(owner, reader):
            data = os.urandom(8 * MIB)
            handle = owner.offer(data, lease_s=60)
            pulling = asyncio.ensure_future(reader.pull(handle, timeout_s=TIMEOUT_S))
            await until(lambda: owner._owner_ends)
            pulling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pulling
            await until(lambda: not owner._owner_ends)
            assert owner.num_offers == 1
            assert await reader.pull(handle, timeout_s=TIMEOUT_S) == data

    run_async(main())


async def stalled_reader(handle: Handle) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Asks for the payload and reads nothing of it."""
    host, port = handle.address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"P" + bytes.fromhex(handle.key) + handle.generation.to_bytes(8, "little"))
    await writer.drain()
    await reader.readexactly(1)
    return reader, writer


def test_a_large_checksum_is_computed_beside_the_loop(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def crc32(data: bytes, *args: int) -> int:
        threads.append(threading.get_ident())
        return zlib.crc32(data, *args)

    async def main() -> None:
        owner, reader = SocketBulk(), SocketBulk()
        async with started(owner, reader):
            monkeypatch.setattr(bulk, "crc32", crc32)
            for size in (bulk.SUMMED_BYTES, bulk.SUMMED_BYTES + 1):
                data = bytes(size)
                assert await reader.unwrap(await owner.wrap(data)) == data
            assert [thread == threading.get_ident() for thread in threads] == [True, False]

    run_async(main())


def test_a_slow_reader_holds_up_nobody_and_ends_with_its_lease(run_async: Run) -> None:
    async def main() -> None:
        owner, reader = SocketBulk(), SocketBulk()
        async with started(owner, reader):
            slow = owner.offer(bytes(64 * MIB), lease_s=3600)
            slow_reader, slow_writer = await stalled_reader(slow)
            data = os.urandom(2 * MIB)
            assert await reader.pull(owner.offer(data, lease_s=60), timeout_s=TIMEOUT_S) == data
            await until(lambda: owner.num_offers == 1)
            (end,) = (end for end in owner._owner_ends if end._offer is not None)
            assert end._sent < 64 * MIB, "the whole payload was buffered for a reader that does not read"
            owner._shelf.revoke(slow.key)  # what the end of the lease does
            assert owner.num_offers == 0
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await slow_reader.readexactly(64 * MIB)
            slow_writer.close()

    run_async(main())


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"P" * 26, b"\x00" * 1000])
def test_bytes_that_are_no_request_end_only_their_connection(run_async: Run, junk: bytes) -> None:
    async def main() -> None:
        owner, reader = SocketBulk(), SocketBulk()
        async with started(owner, reader):
            handle = owner.offer(b"x", lease_s=60)
            host, port = handle.address.removeprefix("tcp://").split(":")
            stranger, writer = await asyncio.open_connection(host, int(port))
            writer.write(junk)
            writer.write_eof()
            async with asyncio.timeout(TIMEOUT_S):
                with suppress(ConnectionError):  # aborted is as good as closed
                    await stranger.read()
            writer.close()
            assert await reader.pull(handle, timeout_s=TIMEOUT_S) == b"x"

    run_async(main())


def test_connections_are_used_again(run_async: Run) -> None:
    async def main() -> None:
        owner, reader = SocketBulk(), SocketBulk()
        async with started(owner, reader):
            for i in range(10):
                assert await reader.pull(owner.offer(b"%d" % i, lease_s=60), timeout_s=TIMEOUT_S) == b"%d" % i
            assert len(owner._owner_ends) == 1
            for end in owner._owner_ends:
                end.abort()  # the owner hung up on an idle connection: the next pull takes a new one
            handle = owner.offer(b"again", lease_s=60)
            assert await reader.pull(handle, timeout_s=TIMEOUT_S) == b"again"

    run_async(main())


def test_handles_name_the_advertised_host(run_async: Run) -> None:
    async def main() -> None:
        owner, reader = SocketBulk(advertise="localhost"), SocketBulk()
        async with started(owner, reader):
            handle = owner.offer(b"x", lease_s=60)
            assert handle.address.startswith("tcp://localhost:")
            assert await reader.pull(handle, timeout_s=TIMEOUT_S) == b"x"

    run_async(main())
