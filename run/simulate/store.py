"""The KV cache of the simulation: which blocks exist, and which windows can be had. Simulated are the disk, the
writers, the reclaimer and the bytes; who looks up, what is a hit, and what it saves are the real thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.prefill.disk import Loader
from actors.prefill.job import Job, Loading
from actors.prefill.restore import Fetched
from actors.rules.chain import KEY_BYTES
from actors.rules.location import LOCATION_BYTES
from actors.rules.slab import Slab
from bus.actor import Actor, Envelope, Handler
from bus.bus import Bus
from bus.keeper import Source, Wanted
from bus.subjects import FIND, Address, Subject
from schemas.bulk import Handle
from schemas.cache import BlocksFound, FindBlocks, Snapshot
from schemas.message import Role

WRITE_S = 0.2
"""From a block's computing to its being found: it is gathered, written, and told of."""

LOAD_S = 0.002
BLOCK_LOAD_S = 60e-6
"""Loading takes so long, and so much more a block: 114 kB of the real model at 2 GB/s."""

WINDOWS_S = 600.0
"""So long windows are kept."""

_SNAPSHOT = Handle(address="mem://simulated", key="", generation=0, size_bytes=0, checksum=0)


@dataclass
class Store:
    """By key: from when on a block is there, and until when the windows behind it are. Nothing is ever reclaimed."""

    blocks: dict[bytes, float] = field(default_factory=dict)
    windows: dict[bytes, float] = field(default_factory=dict)


class SimMetadata(Actor):
    """In the place of all metadata shards."""

    role = Role.METADATA

    def __init__(self, id: str, bus: Bus, store: Store) -> None:
        super().__init__(id, bus)
        self._store = store

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {FIND: self._on_find}

    async def _on_find(self, wanted: FindBlocks, envelope: Envelope) -> BlocksFound:
        now_s, blocks, windows = self.now_s(), self._store.blocks, self._store.windows
        num_found, snapshots = 0, list[tuple[int, Snapshot]]()
        for start in range(0, len(wanted.keys), KEY_BYTES):
            key = wanted.keys[start : start + KEY_BYTES]
            if blocks.get(key, now_s + 1) > now_s:
                break
            if (until_s := windows.get(key, 0.0)) > now_s:
                expires_ns = round(until_s * 1e9)
                snapshot = Snapshot(key=key, holder="prefill/simulated", handle=_SNAPSHOT, expires_ns=expires_ns)
                snapshots.append((num_found, snapshot))
            num_found += 1
        return BlocksFound(locations=bytes(num_found * LOCATION_BYTES), snapshots=snapshots)


class SimKeeper:
    """In the place of `bus.keeper.Keeper`: what is kept is there a little later."""

    snapshots = ()

    def __init__(self, store: Store) -> None:
        self._store = store

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {}

    async def start(self) -> None:
        """Nobody is to be found."""

    def detail(self) -> dict[str, float]:
        return {}

    def is_of_use(self) -> bool:
        return True

    async def keep_blocks(self, engine: Source, owner: str, wanted: Wanted, num_done: int) -> None:
        there_s = asyncio.get_running_loop().time() + WRITE_S
        for number in wanted.blocks(num_done):
            self._store.blocks.setdefault(wanted.key(number), there_s)

    async def keep_windows(
        self, engine: Source, owner: str, wanted: Wanted, ends: Sequence[tuple[int, int]]
    ) -> None:
        until_s = asyncio.get_running_loop().time() + WINDOWS_S
        for number, _ in ends:
            self._store.windows[wanted.key(number - 1)] = until_s

    def forget(self, owner: str) -> None:
        """Nothing is held by request."""

    def close(self) -> None:
        """Nothing is held."""


class SimLoader(Loader):
    """Loads what was found, after the time that takes: no block is ever damaged here."""

    async def _load(self, job: Job, fetched: Fetched, expected: Slab) -> None:
        num_blocks = job.restored.hit.num_blocks
        await asyncio.sleep(LOAD_S + BLOCK_LOAD_S * num_blocks)
        del self._loading[job.id]
        job.loading = Loading.DONE
        windows = None if job.restored.hit.num_replayed else b""
        self.settle(job, replace(job.restored, payloads=(b"",) * num_blocks, windows=windows), "")
        self._on_loaded(job)
