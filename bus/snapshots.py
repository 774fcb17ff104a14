"""Window snapshots: kept for a while in the memory of whoever made them, pulled by whoever needs them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from msgspec import structs

from bus.blocks import Owners
from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.subjects import KEPT
from schemas.cache import Snapshot, SnapshotsKept
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported

log = logging.getLogger("shoal.bus")

SNAPSHOT_S = 600.0
"""How long one is kept that nobody uses."""

POOL_BYTES = 256 * 1024 * 1024
"""The memory that all of one actor's may take, where nothing else is said."""

PULL_S = 2.0
"""How long to try: without it one block is computed again, which takes less."""

TOLD_AT_ONCE = 256
"""How many fit in one message."""


@dataclass(slots=True, eq=False)
class _Kept:
    snapshot: Snapshot
    timer: asyncio.TimerHandle
    told: str = ""  # the metadata shard that knows of it


class Snapshots:
    """Those that one actor holds, one per block key, the first to go those unused for longest; and how to get those of
    others.

        snapshots = Snapshots(bus, bulk, "decode/d0", Ring())      # Ring: actors/rules/ring.py
        await snapshots.on_load(report)                            # each LOAD of a metadata shard
        await snapshots.keep(key, windows, approximate=False)
        windows = await snapshots.pull(snapshot)                   # None: gone, or not what it is said to be
        await snapshots.used(snapshot, windows)                    # so that others will find them, too

    The shard that owns a key is told when its snapshot is kept, and whenever another becomes the owner. That is a hint:
    what counts is whether the holder still has it, under the handle's generation. What is offered begins with its key
    and flag, so a hint that was mixed up is found out.
    """

    def __init__(self, bus: Bus, bulk: Bulk, holder: str, owners: Owners, max_bytes: int = POOL_BYTES) -> None:
        self._bus = bus
        self._bulk = bulk
        self._holder = holder
        self._owners = owners
        self._max_bytes = max_bytes
        self._pool: dict[bytes, _Kept] = {}  # in the order in which they go
        self.num_bytes = 0
        self.pulled_bytes = 0

    def __len__(self) -> int:
        """How many are held."""
        return len(self._pool)

    async def on_load(self, report: LoadReported) -> None:
        """To be told of every load report of a metadata shard: what it owns and has not heard of, it is told."""
        if self._owners.saw(report.id, report.incarnation, asyncio.get_running_loop().time()):
            for kept in self._pool.values():
                if kept.told == report.id:
                    kept.told = ""
        await self._tell(list(self._pool.values()))

    def on_exited(self, exited: ProcessExited) -> None:
        """To be told of every process that ended."""
        for id in exited.ids(Role.METADATA):
            self._owners.forget(id)

    async def keep(self, key: bytes, data: bytes, *, approximate: bool) -> None:
        """Hold the windows at the end of block `key` for whoever pulls them, at most SNAPSHOT_S, and make it known.

        If they are held already, it is these that stay. Nothing happens when they have most of their time left; when
        the new ones are approximate and they are not; or when there is no room even without all others.
        """
        kept = self._pool.get(key)
        if kept is not None and kept.snapshot.approximate == approximate:
            if kept.timer.when() - asyncio.get_running_loop().time() < SNAPSHOT_S / 2:
                await self._hold(kept.snapshot, kept.timer)
            return
        if not self._is_wanted(key, approximate):
            return
        sealed = _head(key, approximate) + data
        checksum = await self._bulk.checksum(sealed)
        if len(sealed) > self._max_bytes or not self._is_wanted(key, approximate):
            return
        self._drop(key)
        while self.num_bytes + len(sealed) > self._max_bytes:
            self._drop(next(iter(self._pool)))
        try:
            handle = self._bulk.offer(sealed, lease_s=SNAPSHOT_S, checksum=checksum, is_shared=True)
        except BusError as error:
            log.info("%s keeps no snapshot: %s", self._holder, error)
            return
        self.num_bytes += len(sealed)
        await self._hold(Snapshot(key=key, holder=self._holder, handle=handle, expires_ns=0, approximate=approximate))

    async def used(self, snapshot: Snapshot, data: bytes) -> None:
        """These windows were pulled and are of use. They are the last to go now if they are held here; and when half of
        their time is over they are kept anew, here, so that they last for as long as they are used."""
        if (kept := self._pool.pop(snapshot.key, None)) is not None:
            self._pool[snapshot.key] = kept
        if snapshot.expires_ns - self._bus.seams.clock_ns() < SNAPSHOT_S / 2 * 1e9:
            await self.keep(snapshot.key, data, approximate=snapshot.approximate)

    async def pull(self, snapshot: Snapshot) -> bytes | None:
        """The windows. None when they are gone, cannot be had within PULL_S, or are damaged, others or not as said."""
        try:
            sealed = await self._bulk.pull(snapshot.handle, timeout_s=PULL_S)
        except BusError as error:
            log.info("no snapshot from %s: %s", snapshot.holder, error)
            return None
        head = _head(snapshot.key, snapshot.approximate)
        if not sealed.startswith(head):
            log.warning("the snapshot from %s is not what it is said to be", snapshot.holder)
            return None
        self.pulled_bytes += len(sealed)
        return sealed[len(head) :]

    def clear(self) -> None:
        """Hold nothing any more."""
        for key in list(self._pool):
            self._drop(key)

    # Inside

    def _is_wanted(self, key: bytes, approximate: bool) -> bool:
        kept = self._pool.get(key)
        return kept is None or (kept.snapshot.approximate and not approximate)

    async def _hold(self, snapshot: Snapshot, last: asyncio.TimerHandle | None = None) -> None:
        """Begin its time (again), with the handle it has: who knows of it from before can pull it all the same."""
        if last is not None:
            last.cancel()
            self._bulk.renew(snapshot.handle, lease_s=SNAPSHOT_S)
        self._pool.pop(snapshot.key, None)
        expires_ns = self._bus.seams.clock_ns() + int(SNAPSHOT_S * 1e9)
        timer = asyncio.get_running_loop().call_later(SNAPSHOT_S, self._drop, snapshot.key)
        kept = self._pool[snapshot.key] = _Kept(structs.replace(snapshot, expires_ns=expires_ns), timer)
        await self._tell([kept])

    def _drop(self, key: bytes) -> None:
        kept = self._pool.pop(key, None)
        if kept is not None:
            kept.timer.cancel()
            self._bulk.withdraw(kept.snapshot.handle)
            self.num_bytes -= kept.snapshot.handle.size_bytes

    async def _tell(self, pool: list[_Kept]) -> None:
        """Tell of each the shard that owns it, if that does not know."""
        if not pool:
            return
        news: dict[str, list[Snapshot]] = {}
        shards = self._owners.of([kept.snapshot.key for kept in pool], asyncio.get_running_loop().time())
        for kept, shard in zip(pool, shards, strict=bool(shards)):
            if kept.told != shard:
                kept.told = shard
                news.setdefault(shard, []).append(kept.snapshot)
        for shard, snapshots in news.items():
            for first in range(0, len(snapshots), TOLD_AT_ONCE):
                message = SnapshotsKept(snapshots=snapshots[first : first + TOLD_AT_ONCE])
                await self._bus.tell(KEPT.at(shard), message)


def _head(key: bytes, approximate: bool) -> bytes:
    return key + bytes([approximate])
