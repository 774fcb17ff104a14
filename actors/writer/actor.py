"""The writer: the one owner of its slabs, and of what the world is told of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from msgspec import structs

from actors.rules.chain import KEY_BYTES
from actors.rules.keys import Keys
from actors.rules.keys import keys as as_keys
from actors.rules.location import LOCATION_BYTES, SLAB_BITS, file_name, parse_name, words
from actors.rules.slab import layout_of
from actors.writer.disk import FULL, Block, Disk
from actors.writer.held import Layout, Place, new_slab
from actors.writer.slots import Slots, Words
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.files import Files
from bus.subjects import ADOPT, DROP, DROPPED, DUMP, FAILED, MAKE_ROOM, STORE, STORED, Address, Subject
from schemas.bulk import Payload
from schemas.cache import (
    AdoptSlab,
    BlocksDumped,
    BlocksFailed,
    BlocksStored,
    BlocksWritten,
    DropBlocks,
    DumpBlocks,
    MakeRoom,
    StoreBlocks,
)
from schemas.failure import Code
from schemas.message import Message, Role
from schemas.request import Taken
from schemas.routing import LoadReported

log = logging.getLogger("shoal.writer")

MAX_WORK_BYTES = 256 * 1024 * 1024
"""Payloads being pulled and written at a time; what comes on top of them is refused."""

ROOM_INTERVAL_S = 1.0
"""How long no room is asked for after none came. Where it comes, more is asked for as soon as it is used up."""

ROOM_S = 2.0
"""How long a store waits for room."""

ANSWER_S = 20.0
"""How long the kvstore may take to answer: it lists the folder."""

FULL_S = 60.0
"""How long no file is made after there was no place on the disk for one: it is smaller than the budget."""

PULL_S = 10.0
"""How long the payloads of a store may take to come."""

NUM_SCANS = 4
"""Slabs read through at a time after a start: one alone waits for the disk, slot by slot."""

RETRY_S = 5.0
"""When a folder that could not be listed is tried again."""


class Writer(Actor):
    """Owns the slabs in the folder `files` that have its id in their names; new ones are of `slab_bytes`.

    It finds its slabs after a start in the background, and says so block by block: `detail["unread_slabs"]` of its load
    report is 0 when it is through. It makes a new file only when the kvstore allows it.
    """

    role: ClassVar[Role] = Role.WRITER

    def __init__(self, id: str, bus: Bus, bulk: Bulk, files: Files, slab_bytes: int) -> None:
        super().__init__(id, bus)
        self.slots = Slots(id, self.incarnation)
        self._bulk = bulk
        self._disk = Disk(self.slots, files, bus.seams.run_beside)
        self._slab_bytes = slab_bytes
        self._publishing = asyncio.Lock()
        self._num_unread: int | None = None
        self._num_stores = 0
        self._work_bytes = 0
        self._room: asyncio.Task[bool] | None = None
        self._has_freed = asyncio.Event()
        self._room_at_s = self._file_at_s = 0.0
        self._checking: asyncio.Task[None] | None = None

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {STORE: self._on_store, DUMP: self._on_dump, DROP: self._on_drop, ADOPT: self._on_adopt}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {FAILED.at(Role.PREFILL): self._on_failed}

    async def on_start(self) -> None:
        self.spawn(self._find_slabs())

    async def on_stop(self) -> None:
        await self._disk.files.close()

    def load(self) -> LoadReported:
        return structs.replace(
            super().load(),
            num_running=self._num_stores,
            detail={
                "seq": self.slots.seq,
                "blocks": self.slots.num_blocks,
                "free_slots": self.slots.num_free(),
                "slots": self.slots.num_slots,
                "work_bytes": self._work_bytes,
                "unread_slabs": 1 if self._num_unread is None else self._num_unread,
            },
        )

    # Storing

    async def _on_store(self, message: StoreBlocks, envelope: Envelope) -> Message | None:
        keys, parents = _keys(message.keys), _keys(message.parents)
        size_bytes = message.payloads.size_bytes
        if len(keys) != len(parents) or not len(keys) or not size_bytes or size_bytes % len(keys):
            raise fail(Code.BAD_REQUEST, f"{len(keys)} keys, {len(parents)} parents and {size_bytes} bytes of payloads")
        if self.is_draining:
            raise fail(Code.SHUTTING_DOWN, f"writer {self.id} is leaving")
        wanted = self.slots.wanted(keys, approximate=message.approximate)
        self.slots.repeat(keys[~wanted])  # whoever offers what is there did not find it
        if not wanted.any():
            await self._publish()
            return BlocksWritten(num_new=0)
        if self._work_bytes + size_bytes > MAX_WORK_BYTES:
            raise fail(Code.OVERLOADED, f"writer {self.id} has {self._work_bytes} bytes in work")
        self._num_stores += 1
        self._work_bytes += size_bytes
        self.spawn(self._store(message, keys, parents, np.flatnonzero(wanted).tolist(), envelope))
        return None

    async def _store(
        self, message: StoreBlocks, keys: Keys, parents: Keys, numbers: Sequence[int], envelope: Envelope
    ) -> None:
        try:
            data = memoryview(await self._bulk.unwrap(message.payloads, timeout_s=PULL_S))
            try:
                num_new = await self._write(message, keys, parents, numbers, data)
            finally:
                await self._publish()
            await envelope.answer(BlocksWritten(num_new=num_new))
        except BusError as error:
            await envelope.answer(error.failure)
        except OSError as error:
            code = Code.OVERLOADED if error.errno in FULL else Code.INTERNAL
            await envelope.answer(fail(code, f"writer {self.id} could not write: {error.strerror}").failure)
        finally:
            self._num_stores -= 1
            self._work_bytes -= message.payloads.size_bytes

    async def _write(
        self, message: StoreBlocks, keys: Keys, parents: Keys, numbers: Sequence[int], data: memoryview
    ) -> int:
        """Have blocks of these numbers in slots; how many were not there yet."""
        size = len(data) // len(keys)
        places = await self._take((size, layout_of(message.space)), len(numbers))
        blocks = [
            Block(keys[number].tobytes(), parents[number].tobytes(), data[number * size : (number + 1) * size])
            for number in numbers
        ]
        return await self._disk.store(places, blocks, approximate=message.approximate)

    async def _take(self, layout: Layout, num: int) -> Sequence[Place]:
        """Places to write in; more room is asked for before it runs out, and waited for when it has.

        Raises `BusError(overloaded)`.
        """
        low = max(min(new_slab(layout, self._slab_bytes).num_slots, self.slots.num_slots) // 8, 1)
        give_up_s = self.now_s() + ROOM_S
        while (places := self.slots.take(layout, num)) is None and (left_s := give_up_s - self.now_s()) > 0:
            asking = self._ask_for_room(layout, max(2 * low, num))
            if asking is not None:
                await asyncio.wait([asking], timeout=left_s)
            if asking is None or not asking.done() or not asking.result():
                places = self.slots.take(layout, num)  # slots may have come free all the same
                break
        if places is None:
            raise fail(Code.OVERLOADED, f"writer {self.id} has {self.slots.num_free(layout)} free slots of {num}")
        if self.slots.num_free(layout) < low:
            self._ask_for_room(layout, 2 * low)
        return places

    # Room

    def _ask_for_room(self, layout: Layout, num: int) -> asyncio.Task[bool] | None:
        """The asking that is under way; None if it is too early for another one."""
        if self._room is not None and not self._room.done():
            return self._room
        if self._num_unread != 0 or self.now_s() < self._room_at_s:
            return None
        self._room = self.spawn(self._make_room(layout, num))
        return self._room

    async def _make_room(self, layout: Layout, num: int) -> bool:
        """Whether there is more room now. If not, nobody asks again for a while."""
        await self._disk.retry()
        await self._publish()
        self._has_freed.clear()
        slab, is_creating = new_slab(layout, self._slab_bytes), False
        try:
            while useless := self.slots.empty(layout):
                await self._disk.remove(useless[0])
            file_bytes = slab.file_bytes if self.now_s() >= self._file_at_s else 0
            request = MakeRoom(writer=self.id, num_slots=num, slab_bytes=file_bytes)
            made = await self.bus.ask(MAKE_ROOM.any(), request, timeout_s=ANSWER_S)
            if is_creating := made.may_add:
                await self._disk.create(self.bus.seams.random.getrandbits(SLAB_BITS), slab)
            else:
                async with asyncio.timeout(ROOM_S):
                    await self._has_freed.wait()
            return True
        except (OSError, BusError) as error:  # TimeoutError is an OSError, too
            if is_creating and file_bytes and self.slots.num_slots:
                log.warning("writer %s has no place for a file of %d bytes: %r", self.id, file_bytes, error)
                self._file_at_s = self.now_s() + FULL_S
                return await self._make_room(layout, num)
            log.warning("writer %s gets no room for %d blocks of %d bytes: %r", self.id, num, layout[0], error)
        self._room_at_s = self.now_s() + ROOM_INTERVAL_S
        return False

    # Slabs that come and go

    async def _find_slabs(self) -> None:
        """Take over all of our slabs that are in the folder."""
        while self._num_unread is None:
            try:
                infos = await self._disk.files.list()
                ours = [(info, name) for info in infos if (name := parse_name(info.name)) and name[1] == self.id]
                self._num_unread = len(ours)
            except OSError as error:
                log.error("writer %s cannot list its folder: %s", self.id, error)
                await asyncio.sleep(RETRY_S)
        waiting = iter([(number, info.size_bytes) for info, (number, _) in ours])
        await asyncio.gather(*(self._take_over_each(waiting) for _ in range(NUM_SCANS)))
        await self.report_load()

    async def _take_over_each(self, waiting: Iterator[tuple[int, int]]) -> None:
        for number, size_bytes in waiting:
            await self._disk.take_over(number, size_bytes)
            await self._publish()
            assert self._num_unread is not None
            self._num_unread -= 1

    async def _on_adopt(self, message: AdoptSlab, envelope: Envelope) -> Message | None:
        if parse_name(message.name) is None:
            raise fail(Code.BAD_REQUEST, f"{message.name!r} is no slab")
        if self._num_unread != 0:
            raise fail(Code.OVERLOADED, f"writer {self.id} still reads its own slabs")
        self.spawn(self._adopt(message.name, envelope))
        return None

    async def _adopt(self, name: str, envelope: Envelope) -> None:
        """Under a new number: so what its old writer, should it live after all, says of it is said of another slab."""
        number = self.bus.seams.random.getrandbits(SLAB_BITS)
        try:
            sizes = dict(await self._disk.files.list())
            await self._disk.files.rename(name, file_name(number, self.id))
        except OSError as error:
            await envelope.answer(fail(Code.NOT_FOUND, f"{self.id} cannot adopt {name}: {error.strerror}").failure)
            return
        await self._disk.take_over(number, sizes.get(name, 0))
        await self._publish()
        await envelope.answer(Taken())

    # Blocks that go

    async def _on_drop(self, message: DropBlocks, envelope: Envelope) -> Message | None:
        self.spawn(self._finish_drop(self.slots.drop(*_places(message)), envelope))
        return None

    async def _finish_drop(self, places: Sequence[Place], envelope: Envelope) -> None:
        await self._publish()
        await self._disk.free(places)
        self._has_freed.set()
        await envelope.answer(Taken())

    async def _on_failed(self, message: BlocksFailed, envelope: Envelope) -> None:
        self._disk.suspect(*_places(message))
        await self._publish()
        if self._checking is None or self._checking.done():
            self._checking = self.spawn(self._check())

    async def _check(self) -> None:
        while self._disk.suspects:
            await self._disk.check()
            await self._publish()

    # Telling

    async def _on_dump(self, message: DumpBlocks, envelope: Envelope) -> Message | None:
        self.spawn(self._dump(message, envelope))
        return None

    async def _dump(self, message: DumpBlocks, envelope: Envelope) -> None:
        # Whoever asks may have had no word of us for long, and our slabs been given away meanwhile.
        await self._disk.forget_missing()
        await self._publish()
        blocks, seq, slabs = self.slots.dump(), self.slots.seq, [held.number for held in self.slots.slabs]
        try:
            chosen = await self.bus.seams.run_beside(lambda: blocks.owned(message.shard, message.shards))
            dumped = BlocksDumped(
                writer=self.id,
                incarnation=self.incarnation,
                seq=seq,
                slabs=slabs,
                keys=await self._bulk.wrap(chosen.keys.tobytes()),
                parents=Payload() if message.shards else await self._bulk.wrap(chosen.parents.tobytes()),
                locations=await self._bulk.wrap(chosen.locations.tobytes()),
            )
        except BusError as error:
            await envelope.answer(error.failure)
        else:
            await envelope.answer(dumped)

    async def _publish(self) -> None:
        """Send what is to be told, in order, whoever calls."""
        async with self._publishing:
            while self.slots.outbox:
                event = self.slots.outbox.pop(0)
                if isinstance(event, BlocksStored):
                    await self.bus.tell(STORED.at(self.role), event)
                else:
                    await self.bus.tell(DROPPED.at(self.role), event)


def _keys(data: bytes) -> Keys:
    """Raises `BusError(bad_request)` for a part of one."""
    if len(data) % KEY_BYTES:
        raise fail(Code.BAD_REQUEST, f"{len(data)} bytes are no keys")
    return as_keys(data)


def _places(message: DropBlocks | BlocksFailed) -> tuple[Keys, Words]:
    """Keys and where they are. Raises `BusError(bad_request)` where there is not one for each."""
    keys = _keys(message.keys)
    if len(message.locations) != len(keys) * LOCATION_BYTES:
        raise fail(Code.BAD_REQUEST, f"{len(message.locations)} bytes of locations for {len(keys)} keys")
    return keys, words(message.locations)
