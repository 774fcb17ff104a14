"""Bytes too large for a message: their owner offers them, the receiver pulls them, directly, beside the broker."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import Protocol
from urllib.parse import urlsplit

from isal.isal_zlib import crc32

from bus.bus import BusError
from bus.frame import OwnerEnd, ReaderEnd, failed
from bus.shelf import Offer, Shelf
from schemas.bulk import Handle, Payload

INLINE_BYTES = 192 * 1024
"""What still travels inside a message of at most 256 KiB."""

LEASE_S = 60.0
"""How long a wrapped payload waits to be unwrapped."""

MAX_BYTES = 1 << 30
"""What one owner holds for others, and the largest payload one pull accepts, where nothing else is said."""

SUMMED_BYTES = 8 * 1024 * 1024
"""What is summed up on the loop: less than half a millisecond. Asking a thread costs a tenth of that."""

MAX_IDLE_CONNECTIONS = 4

BACKLOG = 4096
"""Connections that may wait. Past asyncio's 100 a burst of pulls loses some, for the second TCP takes to retry."""


class Bulk(Protocol):
    """Offers and pulls. A handle is good for one successful pull, a shared one for any number, until its lease ends."""

    @property
    def num_offers(self) -> int:
        """How many payloads are held for others."""
        ...

    async def start(self) -> None:
        """Be reachable for pulls."""
        ...

    async def close(self) -> None:
        """Drop all offers and connections. Idempotent."""
        ...

    async def checksum(self, data: bytes) -> int:
        """CRC-32, computed beside the loop when it takes long."""
        ...

    def offer(self, data: bytes, *, lease_s: float, checksum: int | None = None, is_shared: bool = False) -> Handle:
        """Hold `data` for one receiver, until it has acknowledged it or for `lease_s`; if `is_shared` for any number of
        them, until it is withdrawn or for `lease_s`. Pass what may be large with its `checksum`, which is computed here
        and now otherwise.

        Raises `BusError(overloaded)` when too much is held already.
        """
        ...

    def renew(self, handle: Handle, *, lease_s: float) -> None:
        """Hold it for `lease_s` from now on. Nothing happens if it is not held any more."""
        ...

    def withdraw(self, handle: Handle) -> None:
        """Hold it no longer; a pull under way fails. Idempotent."""
        ...

    async def pull(self, handle: Handle, *, timeout_s: float) -> bytes:
        """The bytes, checked against size, generation and checksum, and acknowledged to their owner.

        Raises `BusError(transfer_failed)`: unreachable, expired, stale, truncated, damaged, or not done in time.
        """
        ...

    async def wrap(self, data: bytes, *, is_shared: bool = False) -> Payload:
        """A payload for a message: inline when it fits, else by handle (see `offer`)."""
        ...

    async def unwrap(self, payload: Payload, *, timeout_s: float = 30.0) -> bytes:
        """The bytes of a payload. Raises `BusError(transfer_failed)`."""
        ...


class _Base:
    """What both kinds share."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._address = ""

    @property
    def num_offers(self) -> int:
        return len(self._shelf)

    async def checksum(self, data: bytes) -> int:
        """See `Bulk.checksum`."""
        return crc32(data)

    def offer(self, data: bytes, *, lease_s: float, checksum: int | None = None, is_shared: bool = False) -> Handle:
        """See `Bulk.offer`."""
        return self._shelf.put(self._address, data, lease_s, checksum, is_shared=is_shared)

    def renew(self, handle: Handle, *, lease_s: float) -> None:
        """See `Bulk.renew`."""
        self._shelf.renew(handle.key, lease_s)

    def withdraw(self, handle: Handle) -> None:
        """See `Bulk.withdraw`."""
        self._shelf.revoke(handle.key)

    async def pull(self, handle: Handle, *, timeout_s: float) -> bytes:
        """See `Bulk.pull`."""
        raise NotImplementedError

    async def wrap(self, data: bytes, *, is_shared: bool = False) -> Payload:
        """See `Bulk.wrap`."""
        if len(data) <= INLINE_BYTES:
            return Payload(inline=data)
        checksum = await self.checksum(data)
        return Payload(handle=self.offer(data, lease_s=LEASE_S, checksum=checksum, is_shared=is_shared))

    async def unwrap(self, payload: Payload, *, timeout_s: float = 30.0) -> bytes:
        """See `Bulk.unwrap`."""
        if payload.handle is None:
            return payload.inline
        return await self.pull(payload.handle, timeout_s=timeout_s)


class SocketBulk(_Base):
    """Bulk over TCP. Listens on `host`, any free port; handles name `advertise` (default: `host`) as the place to call.

    The key in a handle is 128 random bits, and all that protects the bytes: listen on loopback or a private network.
    """

    def __init__(self, *, host: str = "127.0.0.1", advertise: str = "", max_bytes: int = MAX_BYTES) -> None:
        super().__init__(Shelf(lambda: secrets.token_hex(16), max_bytes))
        self._host = host
        self._advertise = advertise or host
        self._server: asyncio.Server | None = None
        self._owner_ends: set[OwnerEnd] = set()
        self._reader_ends: set[ReaderEnd] = set()
        self._idle: dict[str, list[ReaderEnd]] = {}

    async def checksum(self, data: bytes) -> int:
        """See `Bulk.checksum`."""
        return crc32(data) if len(data) <= SUMMED_BYTES else await asyncio.to_thread(crc32, data)

    async def start(self) -> None:
        """See `Bulk.start`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: OwnerEnd(self._shelf, self._owner_ends), self._host, 0, backlog=BACKLOG
        )
        self._address = f"tcp://{self._advertise}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """See `Bulk.close`."""
        self._shelf.clear()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for owner_end in self._owner_ends:
            owner_end.abort()
        for reader_end in self._reader_ends:
            reader_end.abort()
        if server is not None:
            await server.wait_closed()
        await asyncio.sleep(0)  # the transports' own clean-up

    async def pull(self, handle: Handle, *, timeout_s: float) -> bytes:
        """See `Bulk.pull`."""
        if handle.size_bytes > self._shelf.max_bytes:
            raise failed(handle, f"more than the {self._shelf.max_bytes} bytes allowed")
        try:
            async with asyncio.timeout(timeout_s):
                while idle := self._idle.get(handle.address):
                    end = idle.pop()
                    try:
                        return await self._pull(end, handle)
                    except BusError:
                        if not end.is_untouched:
                            raise
                return await self._pull(await self._connect(handle), handle)
        except TimeoutError:
            raise failed(handle, f"not done within {timeout_s:g} s") from None

    async def _pull(self, end: ReaderEnd, handle: Handle) -> bytes:
        try:
            data = await end.pull(handle)
        except BaseException:
            end.abort()
            raise
        idle = self._idle.setdefault(handle.address, [])
        if len(idle) < MAX_IDLE_CONNECTIONS and end in self._reader_ends:
            idle.append(end)
        else:
            end.close()
        return data

    async def _connect(self, handle: Handle) -> ReaderEnd:
        try:
            place = urlsplit(handle.address)
            if place.scheme != "tcp" or place.hostname is None or place.port is None:
                raise ValueError("not a tcp address")
            _, end = await asyncio.get_running_loop().create_connection(
                lambda: ReaderEnd(self._forget), place.hostname, place.port
            )
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise failed(handle, f"cannot connect: {error}") from None
        self._reader_ends.add(end)
        return end

    def _forget(self, end: ReaderEnd) -> None:
        self._reader_ends.discard(end)
        for address, idle in list(self._idle.items()):
            if end in idle:
                idle.remove(end)
            if not idle:
                del self._idle[address]


class MemoryHub:
    """The place where the memory bulks of one process find each other."""

    def __init__(self) -> None:
        self.bulks: dict[str, MemoryBulk] = {}
        self.names = itertools.count(1)


class MemoryBulk(_Base):
    """Bulk within one process: no sockets, leases on the loop's clock, the same keys in every run."""

    def __init__(self, hub: MemoryHub, *, max_bytes: int = MAX_BYTES) -> None:
        keys = itertools.count(1)
        super().__init__(Shelf(lambda: f"{next(keys):032x}", max_bytes))
        self._hub = hub
        self._address = f"mem://{next(hub.names)}"
        self._is_cut = False

    async def start(self) -> None:
        """See `Bulk.start`."""
        if not self._is_cut:
            self._hub.bulks[self._address] = self

    async def close(self) -> None:
        """See `Bulk.close`."""
        self._shelf.clear()
        self._hub.bulks.pop(self._address, None)

    def cut(self) -> None:
        """Die without a word: nobody can pull from here, and no pull from here succeeds."""
        self._is_cut = True
        self._shelf.clear()
        self._hub.bulks.pop(self._address, None)

    async def pull(self, handle: Handle, *, timeout_s: float) -> bytes:
        """See `Bulk.pull`."""
        await asyncio.sleep(0)
        owner = self._hub.bulks.get(handle.address)
        if owner is None or self._is_cut:
            raise failed(handle, "cannot connect: nobody is there")
        if handle.size_bytes > self._shelf.max_bytes:
            raise failed(handle, f"more than the {self._shelf.max_bytes} bytes allowed")
        offer = owner._shelf.find(handle.key, handle.generation)
        if not isinstance(offer, Offer):
            raise failed(handle, offer)
        if len(offer.data) != handle.size_bytes:
            raise failed(handle, f"the owner announced {len(offer.data)} bytes")
        if offer.checksum != handle.checksum:
            raise failed(handle, f"damaged: CRC-32 {offer.checksum:08x} instead of {handle.checksum:08x}")
        owner._shelf.acknowledge(handle.key, handle.generation)
        return offer.data
