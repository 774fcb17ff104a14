"""A metadata shard: it tells entrypoints which blocks of a prompt exist, and where their windows can be pulled.

It holds nothing that cannot be had again: blocks from the writers that have them, snapshots from their holders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import structs

from actors.metadata.directory import Directory
from actors.metadata.shard import Shard
from actors.rules import keys as block_keys
from actors.rules import location
from actors.rules.blocks import Keys, Values
from actors.rules.chain import KEY_BYTES
from actors.rules.owner import Members
from actors.rules.writers import Event, Writers
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, fail
from bus.dumps import Dump, fetch_dump
from bus.subjects import DROPPED, EXITED, FAILED, FIND, KEPT, LOAD, STORED, Address, Subject, report_load
from schemas.cache import BlocksDropped, BlocksFailed, BlocksFound, DumpBlocks, FindBlocks, SnapshotsKept
from schemas.failure import Code
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported, ReportLoad

log = logging.getLogger("shoal.metadata")

MAX_HINTS = 4
"""Snapshots in an answer: the one that counts is of the last block found, or a little before it."""

AT_ONCE = 4096
"""Blocks of a dump that are taken over before others have their turn."""

_HOLDERS = (Role.PREFILL, Role.DECODE)


class Metadata(Actor):
    """One shard. `FIND` takes keys that it owns, in the order of their chain."""

    role = Role.METADATA

    def __init__(self, id: str, bus: Bus, bulk: Bulk) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._shard = Shard(id)
        self._directory = Directory()
        self._writers = Writers()
        self._others = Members()
        self._holders = Members()
        self._incarnations: dict[str, str] = {}  # of the holders there are

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {FIND: self._on_find, KEPT: self._on_kept}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {
            STORED.at(Role.WRITER): self._on_change,
            DROPPED.at(Role.WRITER): self._on_change,
            FAILED.at(Role.PREFILL): self._on_failed,
            LOAD.at(Role.WRITER): self._on_writer,
            LOAD.at(Role.METADATA): self._on_shard,
            **{LOAD.at(role): self._on_holder for role in _HOLDERS},
            EXITED.all(): self._on_exited,
        }

    async def on_start(self) -> None:
        for role in (Role.METADATA, Role.WRITER, *_HOLDERS):
            await self.bus.tell(report_load(role).all(), ReportLoad())

    async def flush(self) -> None:
        now_s = self.now_s()
        self._settle(now_s)
        for id in self._writers.lost(now_s):
            self._writers.asking(id)
            self.spawn(self._repair(id))

    def load(self) -> LoadReported:
        detail = {
            "blocks": float(self._shard.num_blocks),
            "bytes": float(self._shard.num_bytes),
            "snapshots": float(len(self._directory)),
        }
        return structs.replace(super().load(), detail=detail)

    # Questions

    async def _on_find(self, find: FindBlocks, envelope: Envelope) -> BlocksFound:
        if len(find.keys) % KEY_BYTES:
            raise fail(Code.BAD_REQUEST, f"{len(find.keys)} bytes are no keys")
        locations = self._shard.find(block_keys.keys(find.keys))
        now_ns = self.bus.seams.clock_ns()
        snapshots = []
        for number in reversed(range(len(locations))):
            key = find.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            if (snapshot := self._directory.find(key, now_ns)) is not None:
                snapshots.append((number, snapshot))
                if len(snapshots) == MAX_HINTS:
                    break
        return BlocksFound(locations=locations.astype("<u8").tobytes(), snapshots=snapshots[::-1])

    # Snapshots

    async def _on_kept(self, kept: SnapshotsKept, envelope: Envelope) -> None:
        now_ns = self.bus.seams.clock_ns()
        for snapshot in kept.snapshots:
            if len(snapshot.key) == KEY_BYTES:
                self._directory.keep(snapshot, now_ns)
            else:
                log.warning("%s keeps a snapshot of no block", snapshot.holder)

    async def _on_holder(self, report: LoadReported, envelope: Envelope) -> None:
        holder = f"{report.role}/{report.id}"
        if self._incarnations.get(holder, report.incarnation) != report.incarnation:
            self._directory.forget(holder)
        self._incarnations[holder] = report.incarnation
        self._holders.saw(holder, report.incarnation, self.now_s())

    # Blocks

    async def _on_change(self, event: Event, envelope: Envelope) -> None:
        for due in self._writers.event(event):
            self._apply(due)

    def _apply(self, event: Event) -> None:
        if (blocks := location.blocks(event.keys, event.locations)) is None:
            log.warning("event %d of writer %s makes no sense", event.seq, event.writer)
            return
        keys, locations = blocks
        if isinstance(event, BlocksDropped):
            self._shard.drop(keys, locations)
            return
        self._writers.claim(event.writer, np.unique(location.slabs(locations)).tolist())
        self._shard.put(keys, locations)

    async def _on_failed(self, failed: BlocksFailed, envelope: Envelope) -> None:
        """The writer that has them looks after them. Where it is gone, nobody else does."""
        if (blocks := location.blocks(failed.keys, failed.locations)) is None:
            log.warning("blocks that failed, and make no sense: %s", failed.reason)
            return
        keys, locations = blocks
        alive = set(self._writers.alive(self.now_s()))
        is_left = [self._writers.owner(slab) not in alive for slab in location.slabs(locations).tolist()]
        self._shard.drop(keys[is_left], locations[is_left])

    async def _on_writer(self, report: LoadReported, envelope: Envelope) -> None:
        self._writers.heard(report, self.now_s())

    async def _repair(self, id: str) -> None:
        members = self._shard.members
        dump = await fetch_dump(self.bus, self._bulk, id, DumpBlocks(shard=self.id, shards=members))
        if dump is None:
            self._writers.failed(id, self.now_s())
            return
        await self._replace(id, dump)
        for event in self._writers.dumped(id, dump.incarnation, dump.seq):
            self._apply(event)
        if members != self._shard.members:
            self._writers.lose([id])
        self.wake()

    async def _replace(self, id: str, dump: Dump) -> None:
        for _ in self._shard.clear(self._writers.settle(id, dump.slabs)):
            await asyncio.sleep(0)
        keys: Keys = block_keys.keys(dump.keys)
        locations: Values = location.words(dump.locations)
        for start in range(0, len(keys), AT_ONCE):
            self._shard.put(keys[start : start + AT_ONCE], locations[start : start + AT_ONCE])
            await asyncio.sleep(0)

    # Who is here

    async def _on_shard(self, report: LoadReported, envelope: Envelope) -> None:
        if report.id != self.id:
            self._others.saw(report.id, report.incarnation, self.now_s())

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        self._writers.exited(exited.ids(Role.WRITER))
        for id in exited.ids(Role.METADATA):
            self._others.forget(id)
        for role in _HOLDERS:
            for id in exited.ids(role):
                self._holders.forget(f"{role}/{id}")
        self._settle(self.now_s())

    def _settle(self, now_s: float) -> None:
        """Those who are gone are gone, and what there is is shared out among the shards there are."""
        alive = set(self._holders.alive(now_s))
        for holder in [holder for holder in self._incarnations if holder not in alive]:
            del self._incarnations[holder]
            self._directory.forget(holder)
        others = self._others.alive(now_s)
        if sorted({self.id, *others}) == self._shard.members:
            return
        before = self._shard.members
        if self._shard.set_members(others):
            self._writers.lose(self._writers.alive(now_s))
        log.info("metadata %s: %s were the shards, now %s", self.id, before, self._shard.members)
        self._directory.retain(self._shard.owns)
        self.spawn(self._shed())

    async def _shed(self) -> None:
        for _ in self._shard.shed():
            await asyncio.sleep(0)
