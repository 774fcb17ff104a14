"""The two ends of a bulk connection: requests of 25 bytes one way, a reply head and raw bytes the other."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from isal.isal_zlib import crc32

from bus.bus import BusError, fail
from bus.shelf import Offer, Shelf
from schemas.bulk import Handle
from schemas.failure import Code

_REQUEST = struct.Struct("<c16sQ")  # verb, key, generation
_HEAD = struct.Struct("<cQ")  # status; size of the data, or of the text that says why there is none
_PULL, _ACK = b"P", b"A"
_DATA, _REFUSAL = b"D", b"R"

CHUNK_BYTES = 256 * 1024
"""What is handed to the socket at a time. A slow reader makes the owner hold one such chunk, not the payload."""

MAX_REFUSAL_BYTES = 1024


def failed(handle: Handle, why: str) -> BusError:
    """A pull that did not work."""
    return fail(Code.TRANSFER_FAILED, f"pulling {handle.size_bytes} bytes from {handle.address}: {why}")


class OwnerEnd(asyncio.Protocol):
    """Serves one reader, one pull at a time, at the speed the reader takes it."""

    def __init__(self, shelf: Shelf, ends: set[OwnerEnd]) -> None:
        self._shelf = shelf
        self._ends = ends
        self._transport: asyncio.Transport | None = None
        self._requests = bytearray()
        self._offer: Offer | None = None
        self._sent = 0
        self._may_write = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._ends.add(self)

    def data_received(self, data: bytes) -> None:
        """A request, whole or in part."""
        self._requests += data
        while len(self._requests) >= _REQUEST.size and self._offer is None:
            verb, key, generation = _REQUEST.unpack_from(self._requests)
            del self._requests[: _REQUEST.size]
            if verb == _ACK:
                self._shelf.acknowledge(key.hex(), generation)
            elif verb == _PULL:
                self._start(self._shelf.find(key.hex(), generation))
            else:
                self.abort()
                return
        if len(self._requests) > _REQUEST.size:  # a reader waits for its data before it asks again
            self.abort()

    def _start(self, found: Offer | str) -> None:
        assert self._transport is not None
        if isinstance(found, str):
            text = found.encode()
            self._transport.write(_HEAD.pack(_REFUSAL, len(text)) + text)
            return
        self._transport.write(_HEAD.pack(_DATA, len(found.data)))
        if found.data:
            self._offer = found
            self._sent = 0
            found.on_revoked.add(self.abort)
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        while self._offer is not None and self._may_write:
            data = self._offer.data
            self._transport.write(memoryview(data)[self._sent : self._sent + CHUNK_BYTES])
            self._sent += CHUNK_BYTES
            if self._sent >= len(data):
                self._finish()

    def _finish(self) -> None:
        if self._offer is not None:
            self._offer.on_revoked.discard(self.abort)
            self._offer = None

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()
        self._ends.discard(self)

    def abort(self) -> None:
        """End the connection now: the lease is over, or the other side does not keep to the protocol."""
        if self._transport is not None:
            self._transport.abort()


class ReaderEnd(asyncio.BufferedProtocol):
    """Pulls from one owner, one payload at a time, straight into the payload's buffer."""

    def __init__(self, on_lost: Callable[[ReaderEnd], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._handle: Handle | None = None
        self._done: asyncio.Future[bytes] | None = None
        self._buffer = bytearray(_HEAD.size)
        self._filled = 0
        self._status = b""
        self._checksum = 0
        self.is_untouched = True
        """Nothing has come for the current pull: another connection may still succeed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    async def pull(self, handle: Handle) -> bytes:
        """The payload, verified and acknowledged. Raises `BusError(transfer_failed)`; then the end must be aborted."""
        assert self._transport is not None
        self.is_untouched = True
        try:
            request = _REQUEST.pack(_PULL, bytes.fromhex(handle.key), handle.generation)
        except (ValueError, struct.error):
            raise failed(handle, "the handle is damaged") from None
        if self._transport.is_closing():
            raise failed(handle, "the owner closed the connection")
        self._handle, self._status, self._checksum = handle, b"", 0
        self._buffer, self._filled = bytearray(_HEAD.size), 0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        data = await self._done
        if self._checksum != handle.checksum:
            raise failed(handle, f"damaged: CRC-32 {self._checksum:08x} instead of {handle.checksum:08x}")
        self._transport.write(_REQUEST.pack(_ACK, bytes.fromhex(handle.key), handle.generation))
        return data

    def get_buffer(self, sizehint: int) -> memoryview:
        return (
            memoryview(self._buffer)[self._filled :] if self._filled < len(self._buffer) else memoryview(bytearray(1))
        )

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come in, for the head or for the body."""
        if self._handle is None or self._done is None or self._done.done():
            self.abort()  # nobody asked for these
            return
        self.is_untouched = False
        before, self._filled = self._filled, self._filled + nbytes
        if self._status == _DATA:
            with memoryview(self._buffer) as view:
                self._checksum = crc32(view[before : self._filled], self._checksum)
        if self._filled == len(self._buffer):
            if self._status:
                self._finish()
            else:
                self._start(self._handle)

    def _start(self, handle: Handle) -> None:
        self._status, size = _HEAD.unpack(self._buffer)
        if self._status == _DATA and size == handle.size_bytes:
            self._buffer, self._filled = bytearray(size), 0
        elif self._status == _REFUSAL and 0 < size <= MAX_REFUSAL_BYTES:
            self._buffer, self._filled = bytearray(size), 0
        else:
            self._fail(f"the owner announced {size} bytes" if self._status == _DATA else "not a bulk server")
            return
        if size == 0:
            self._finish()

    def _finish(self) -> None:
        assert self._done is not None
        if self._status == _REFUSAL:
            self._fail(self._buffer.decode("utf-8", "replace"))
        else:
            self._done.set_result(bytes(self._buffer))
            self._buffer, self._filled = bytearray(), 0

    def _fail(self, why: str) -> None:
        if self._done is not None and self._handle is not None and not self._done.done():
            self._done.set_exception(failed(self._handle, why))

    def connection_lost(self, exc: Exception | None) -> None:
        got = self._filled if self._status == _DATA else 0
        self._fail(f"the owner closed the connection after {got} bytes")
        self._on_lost(self)

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End the connection once what was written is sent."""
        if self._transport is not None:
            self._transport.close()
