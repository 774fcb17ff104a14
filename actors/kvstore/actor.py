"""The one reclaimer: it knows all blocks and their last use, keeps the folder within its budget, and looks after slabs
whose writer is gone.

It holds nothing that cannot be had again from the writers, but for the order of use: after a restart all count as
used then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import structs

from actors.kvstore.budget import Budget
from actors.kvstore.orphans import Orphans
from actors.kvstore.store import Store
from actors.rules import keys as block_keys
from actors.rules import location
from actors.rules.blocks import Keys, Values
from actors.rules.chain import KEY_BYTES
from actors.rules.writers import Event, Writers
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.dumps import fetch_dump
from bus.files import Files
from bus.insist import insist
from bus.subjects import ADOPT, DROP, DROPPED, EXITED, LOAD, MAKE_ROOM, STORED, TOUCHED, Address, Subject, report_load
from schemas.cache import AdoptSlab, BlocksDropped, BlocksTouched, DropBlocks, DumpBlocks, MakeRoom, RoomMade
from schemas.failure import Code
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported, ReportLoad

log = logging.getLogger("shoal.kvstore")

SWEEP_S = 20.0
"""How often the folder is looked through for slabs that are nobody's."""

PATIENCE_S = 10.0
"""How long room is not made while it is not known what some writer has: its blocks may build on those that would go."""

DROP_S = 5.0
DROP_TRIES = 3
ADOPT_S = 60.0
"""A slab that changes hands is read through."""

BLOCKS_PER_MESSAGE = 8192


class KVStore(Actor):
    """One of its kind in a cluster. `budget_bytes`: what the files of the folder may take in all."""

    role = Role.KVSTORE

    def __init__(self, id: str, bus: Bus, bulk: Bulk, files: Files, budget_bytes: int) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._files = files
        self._budget = Budget(budget_bytes)
        self._orphans = Orphans()
        self._writers = Writers()
        self._store = Store(self._writers)
        self._askers: list[tuple[MakeRoom, Envelope]] = []
        self._answering: asyncio.Task[None] | None = None
        self._wanted: dict[str, int] = {}  # slots that a writer needs
        self._ready_s = 0.0  # when it was last known what all writers have
        self._next_sweep_s = 0.0
        self._num_adopted = 0

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {MAKE_ROOM: self._on_make_room}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {
            STORED.at(Role.WRITER): self._on_change,
            DROPPED.at(Role.WRITER): self._on_change,
            TOUCHED.at(Role.ENTRYPOINT): self._on_touched,
            LOAD.at(Role.WRITER): self._on_writer,
            EXITED.all(): self._on_exited,
        }

    async def on_start(self) -> None:
        self._ready_s = self.now_s()
        await self.bus.tell(report_load(Role.WRITER).all(), ReportLoad())

    async def on_stop(self) -> None:
        await self._files.close()

    async def flush(self) -> None:
        now_s = self.now_s()
        for id in self._writers.lost(now_s):
            self._writers.asking(id)
            self.spawn(self._repair(id))
        self._make_room(now_s)
        for writer, drops in self._store.drops.items():
            keys, locations = (np.concatenate(arrays) for arrays in zip(*drops, strict=True))
            self.spawn(self._drop(writer, keys, locations))
        self._store.drops = {}
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = float("inf")
            self.spawn(self._sweep())

    def load(self) -> LoadReported:
        detail = {
            "blocks": float(self._store.reclaim.num_blocks),
            "bytes": float(self._store.reclaim.size_bytes),
            "budget_bytes": float(self._budget.max_bytes),
            "stored_bytes": float(self._budget.num_bytes(self.now_s())),
            "reclaimed_blocks": float(self._store.num_reclaimed),
            "duplicate_blocks": float(self._store.num_duplicates),
            "adopted_slabs": float(self._num_adopted),
        }
        return structs.replace(super().load(), detail=detail)

    # Blocks

    async def _on_change(self, event: Event, envelope: Envelope) -> None:
        for due in self._writers.event(event):
            self._apply(due)

    def _apply(self, event: Event) -> None:
        parents = event.keys if isinstance(event, BlocksDropped) else event.parents
        if (blocks := location.blocks(event.keys, event.locations)) is None or len(parents) != len(event.keys):
            log.warning("event %d of writer %s makes no sense", event.seq, event.writer)
            return
        keys, locations = blocks
        if isinstance(event, BlocksDropped):
            self._store.dropped(keys, locations)
        else:
            self._store.stored(event.writer, keys, block_keys.keys(parents), locations, self.now_s())

    async def _on_touched(self, touched: BlocksTouched, envelope: Envelope) -> None:
        if len(touched.keys) % KEY_BYTES:
            log.warning("%d bytes of keys were used, which makes no sense", len(touched.keys))
            return
        self._store.reclaim.touched(block_keys.keys(touched.keys), self.now_s())

    async def _on_writer(self, report: LoadReported, envelope: Envelope) -> None:
        self._writers.heard(report, self.now_s())

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        self._writers.exited(exited.ids(Role.WRITER))

    async def _repair(self, id: str) -> None:
        dump = await fetch_dump(self.bus, self._bulk, id, DumpBlocks())
        if dump is None or len(dump.parents) != len(dump.keys):
            self._writers.failed(id, self.now_s())
            return
        keys, parents = block_keys.keys(dump.keys), block_keys.keys(dump.parents)
        locations = location.words(dump.locations)
        for _ in self._store.replace(id, dump.slabs, keys, parents, locations, self.now_s()):
            await asyncio.sleep(0)
        for event in self._writers.dumped(id, dump.incarnation, dump.seq):
            self._apply(event)
        self.wake()

    # Room

    async def _on_make_room(self, room: MakeRoom, envelope: Envelope) -> None:
        self._askers.append((room, envelope))
        if self._answering is None or self._answering.done():
            self._answering = self.spawn(self._answer())

    async def _answer(self) -> None:
        """Beside the mailbox, for a folder may take long to list. One list serves all who asked before it was begun."""
        while self._askers:
            askers, self._askers = self._askers, []
            try:
                files = await self._list()
            except OSError as error:
                failure = fail(Code.INTERNAL, f"the folder of blocks cannot be listed: {error}").failure
                for _, envelope in askers:
                    await envelope.answer(failure)
                continue
            for room, envelope in askers:
                await envelope.answer(self._grant(room, files))
        self.wake()

    def _grant(self, room: MakeRoom, files: Mapping[str, int]) -> RoomMade:
        if self._budget.may_add(room.writer, room.slab_bytes, files, self.now_s()):
            return RoomMade(may_add=True)
        self._wanted[room.writer] = room.num_slots
        return RoomMade(may_add=False)

    def _make_room(self, now_s: float) -> None:
        """For those who wait, once it is known what all writers have, they themselves among them."""
        if self._writers.is_whole(now_s) and self._wanted.keys() <= set(self._writers.alive(now_s)):
            self._ready_s = now_s
        elif now_s - self._ready_s < PATIENCE_S:
            return
        for writer, num_slots in self._wanted.items():
            self._store.make_room(writer, num_slots)
        self._wanted = {}

    async def _drop(self, writer: str, keys: Keys, locations: Values) -> None:
        """Whoever cannot be told to free blocks, which are forgotten here, is asked for all it has when it is back."""
        for start in range(0, len(keys), BLOCKS_PER_MESSAGE):
            some = slice(start, start + BLOCKS_PER_MESSAGE)
            drop = DropBlocks(keys=keys[some].tobytes(), locations=locations[some].astype("<u8").tobytes())
            if await insist(self.bus, DROP.at(writer), drop, timeout_s=DROP_S, tries=DROP_TRIES) is None:
                log.info("writer %s was not told of %d blocks to free", writer, len(keys) - start)
                self._writers.lose([writer])
                return

    async def _sweep(self) -> None:
        """Give slabs that are nobody's to someone; those that the budget has no place for are removed."""
        try:
            files = await self._list()
        except OSError as error:
            log.warning("the folder of blocks cannot be listed: %s", error)
            self._next_sweep_s = self.now_s() + SWEEP_S
            return
        self._budget.see(files)
        for name, heir in self._orphans.heirs(files, self._writers.alive(self.now_s()), self.now_s()):
            parsed = location.parse_name(name)
            assert parsed is not None
            if parsed[1] in self._writers.alive(self.now_s()):
                continue  # it came back meanwhile
            try:
                if self._budget.is_exceeded():
                    await self._files.remove(name)
                    del files[name]
                    self._budget.see(files)
                    self._store.forget(parsed[0])
                else:
                    await self.bus.ask(ADOPT.at(heir), AdoptSlab(name=name), timeout_s=ADOPT_S)
                    self._num_adopted += 1
            except (BusError, OSError) as error:
                log.info("%s is not taken over by writer %s: %s", name, heir, error)
        self._next_sweep_s = self.now_s() + SWEEP_S

    async def _list(self) -> dict[str, int]:
        return {file.name: file.size_bytes for file in await self._files.list()}
