"""What an owner keeps for others to pull: offers with a lease, freed on ACK or when the lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isal.isal_zlib import crc32

from bus.bus import fail
from schemas.bulk import Handle
from schemas.failure import Code


class Offer:
    """Bytes under a lease. `on_revoked` are called when it ends without an ACK, to stop readers in mid-transfer."""

    __slots__ = ("checksum", "data", "generation", "is_shared", "on_revoked", "timer")

    def __init__(
        self, data: bytes, generation: int, checksum: int, timer: asyncio.TimerHandle, *, is_shared: bool
    ) -> None:
        self.data = data
        self.generation = generation
        self.checksum = checksum
        self.timer = timer
        self.is_shared = is_shared
        self.on_revoked: set[Callable[[], None]] = set()


class Shelf:
    """Offers by key. The key is a secret: who knows it may read."""

    def __init__(self, new_key: Callable[[], str], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._new_key = new_key
        self._offers: dict[str, Offer] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._offers)

    def put(self, address: str, data: bytes, lease_s: float, checksum: int | None, *, is_shared: bool) -> Handle:
        """Keep `data` until it is acknowledged, at most `lease_s`; a shared one until it is revoked.

        Raises `BusError(overloaded)` when full.
        """
        if checksum is None:
            checksum = crc32(data)
        if self.num_bytes + len(data) > self.max_bytes:
            raise fail(
                Code.OVERLOADED,
                f"{len(data)} bytes do not fit: {len(self)} offers hold {self.num_bytes} of {self.max_bytes}",
            )
        self._generation += 1
        key = self._new_key()
        timer = asyncio.get_running_loop().call_later(lease_s, self.revoke, key)
        offer = self._offers[key] = Offer(data, self._generation, checksum, timer, is_shared=is_shared)
        self.num_bytes += len(data)
        return Handle(
            address=address, key=key, generation=offer.generation, size_bytes=len(data), checksum=offer.checksum
        )

    def renew(self, key: str, lease_s: float) -> None:
        """Its lease begins anew, if it is here still."""
        if (offer := self._offers.get(key)) is not None:
            offer.timer.cancel()
            offer.timer = asyncio.get_running_loop().call_later(lease_s, self.revoke, key)

    def find(self, key: str, generation: int) -> Offer | str:
        """The offer, or why there is none."""
        offer = self._offers.get(key)
        if offer is None:
            return "the owner has no such offer: its lease is over, or it was pulled already"
        if offer.generation != generation:
            return f"the handle is stale: generation {generation}, the owner is at {offer.generation}"
        return offer

    def acknowledge(self, key: str, generation: int) -> None:
        """The reader has it all: free it, unless there may be others. Idempotent."""
        offer = self.find(key, generation)
        if isinstance(offer, Offer) and not offer.is_shared:
            self._remove(key)

    def revoke(self, key: str) -> None:
        """Free it whether or not anyone has read it, and stop who is reading. Idempotent."""
        if key in self._offers:
            for on_revoked in list(self._remove(key).on_revoked):
                on_revoked()

    def clear(self) -> None:
        """Revoke everything."""
        for key in list(self._offers):
            self.revoke(key)

    def _remove(self, key: str) -> Offer:
        offer = self._offers.pop(key)
        offer.timer.cancel()
        self.num_bytes -= len(offer.data)
        return offer
