"""A writer in a small world: who allows it room, who hears its events, who reads its slabs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.rules.location import Location, parse_name
from actors.rules.slab import HEADER_BYTES, Slab, SlotError, read_slot
from actors.writer.actor import Writer
from bus.actor import Actor
from bus.bus import Bus, BusError, Delivery, decoder
from bus.subjects import DROP, DROPPED, DUMP, FAILED, LOAD, MAKE_ROOM, STORE, STORED
from run.simulator import World
from schemas.cache import (
    BlocksDropped,
    BlocksFailed,
    BlocksStored,
    DropBlocks,
    DumpBlocks,
    MakeRoom,
    RoomMade,
    StoreBlocks,
)
from schemas.failure import Code
from schemas.message import Role
from schemas.routing import LoadReported

SPACE = "tiny 1"
SIZE = 200
SLOT_BYTES = HEADER_BYTES + SIZE
TIMEOUT_S = 30.0


def slab_bytes(num_slots: int) -> int:
    return HEADER_BYTES + num_slots * SLOT_BYTES


def key(number: int) -> bytes:
    return hashlib.sha256(f"key {number}".encode()).digest()[:16]


def payload(number: int, size: int = SIZE, *, approximate: bool = False) -> bytes:
    return hashlib.shake_128(f"payload {number} {approximate}".encode()).digest(size)


def joined(numbers: Sequence[int]) -> bytes:
    return b"".join(key(number) for number in numbers)


class Room(Actor):
    """A kvstore that says what it is told to say."""

    role = Role.KVSTORE

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.may_add = True
        self.delay_s = 0.0
        self.asked: list[MakeRoom] = []

    def handlers(self) -> Any:
        return {MAKE_ROOM: self._on_make_room}

    async def _on_make_room(self, message: MakeRoom, envelope: Any) -> RoomMade:
        self.asked.append(message)
        await asyncio.sleep(self.delay_s)
        return RoomMade(may_add=self.may_add and message.slab_bytes > 0)


class Desk:
    """Who asks the writer, and hears all it tells. `found`: key -> location, as its events say."""

    def __init__(self, world: World, bus: Bus, bulk: Any) -> None:
        self.world = world
        self.bus = bus
        self.bulk = bulk
        self.found: dict[bytes, int] = {}
        self.seqs: dict[str, int] = {}
        self.report: LoadReported | None = None

    async def listen(self) -> None:
        for subject in (STORED, DROPPED, LOAD):
            await self.bus.wire.subscribe(subject.at(Role.WRITER).name, self._on_event(subject.message))

    def _on_event(self, kind: type[Any]) -> Callable[[Delivery], None]:
        def hear(delivery: Delivery) -> None:
            event = decoder(kind).decode(delivery.body)
            if isinstance(event, LoadReported):
                self.report = event
                return
            self.seqs[event.incarnation] = self.seqs.get(event.incarnation, 0) + 1
            assert event.seq == self.seqs[event.incarnation], "an event is missing or out of order"
            for name, location in pairs(event):
                if isinstance(event, BlocksStored):
                    self.found[name] = location
                elif self.found.get(name) == location:
                    del self.found[name]

        return hear

    async def store(self, *numbers: int, approximate: bool = False, space: str = SPACE, size: int = SIZE) -> int:
        """Have these blocks stored; how many were new."""
        data = b"".join(payload(number, size, approximate=approximate) for number in numbers)
        message = StoreBlocks(
            space=space,
            keys=joined(numbers),
            parents=joined([number - 1 for number in numbers]),
            payloads=await self.bulk.wrap(data),
            approximate=approximate,
        )
        try:
            written = await self.bus.ask(STORE.at("w0"), message, timeout_s=TIMEOUT_S)
        finally:
            if message.payloads.handle is not None:
                self.bulk.withdraw(message.payloads.handle)
        await asyncio.sleep(0)
        return written.num_new

    async def drop(self, *numbers: int, location: int | None = None) -> None:
        locations = [self.found.get(key(number), 0) if location is None else location for number in numbers]
        packed = b"".join(word.to_bytes(8, "little") for word in locations)
        await self.bus.ask(DROP.at("w0"), DropBlocks(keys=joined(numbers), locations=packed), timeout_s=TIMEOUT_S)
        await asyncio.sleep(0)

    async def report_failed(self, *numbers: int) -> None:
        """Say that these could not be read, and wait until the writer has looked."""
        locations = b"".join(self.found[key(number)].to_bytes(8, "little") for number in numbers)
        event = BlocksFailed(keys=joined(numbers), locations=locations, reason="test")
        await self.bus.tell(FAILED.at(Role.PREFILL), event)
        await asyncio.sleep(1)

    async def dump(self) -> dict[bytes, int]:
        dumped = await self.bus.ask(DUMP.at("w0"), DumpBlocks(), timeout_s=TIMEOUT_S)
        assert dumped.seq == self.seqs.get(dumped.incarnation, 0)
        keys, locations = await self.bulk.unwrap(dumped.keys), await self.bulk.unwrap(dumped.locations)
        assert len(await self.bulk.unwrap(dumped.parents)) == len(keys)
        return dict(pairs(BlocksStored(**_event(dumped, keys, locations))))

    @property
    def room(self) -> Room:
        """Who says whether there is more room."""
        actor = self.world.actors["kvstore/k0"]
        assert isinstance(actor, Room)
        return actor

    async def refused(self, *numbers: int, space: str = SPACE) -> Code:
        """How the store of these is refused."""
        with pytest.raises(BusError) as caught:
            await self.store(*numbers, space=space)
        return caught.value.code

    def read(self, number: int) -> bytes | None:
        """What a reader gets who knows the location: None for a miss."""
        word = self.found.get(key(number))
        return None if word is None else self.read_at(word, number)

    def read_at(self, word: int, number: int) -> bytes | None:
        location = Location.unpack(word)
        for name, data in self.world.folder.files.items():
            parsed = parse_name(name)
            if parsed is not None and parsed[0] == location.slab:
                try:
                    slab = Slab.unpack(data)
                    found = read_slot(bytes(data[slab.offset(location.slot) :]), slab, key(number))
                except SlotError:
                    return None
                return bytes(found.payload)
        return None

    def readable(self, *numbers: int) -> list[int]:
        """Which of these give their own content; the others give none."""
        good = []
        for number in numbers:
            got = self.read(number)
            if got is not None:
                assert got in (payload(number), payload(number, approximate=True)), "another block's content"
                good.append(number)
        return good

    async def start_writer(self, num_slots: int = 8) -> Writer:
        """The writer w0, when it has found its slabs."""
        await self.world.add_writer("w0", slab_bytes(num_slots))
        async with asyncio.timeout(TIMEOUT_S):
            while self.report is None or self.report.detail["unread_slabs"]:
                await asyncio.sleep(0.1)
        writer = self.world.actors["writer/w0"]
        assert isinstance(writer, Writer)
        return writer

    async def restart(self, num_slots: int = 8) -> Writer:
        """Kill the writer and start it again, with nothing known of its blocks."""
        self.world.kill("writer/w0")
        await asyncio.wait([self.world.tasks["writer/w0"]])
        self.report = None
        self.found.clear()
        return await self.start_writer(num_slots)


def pairs(event: BlocksStored | BlocksDropped) -> list[tuple[bytes, int]]:
    keys = [event.keys[at : at + 16] for at in range(0, len(event.keys), 16)]
    words = [event.locations[at : at + 8] for at in range(0, len(event.locations), 8)]
    return [(name, int.from_bytes(word, "little")) for name, word in zip(keys, words, strict=True)]


def _event(dumped: Any, keys: bytes, locations: bytes) -> dict[str, Any]:
    return {
        "writer": dumped.writer,
        "incarnation": dumped.incarnation,
        "seq": dumped.seq,
        "keys": keys,
        "parents": b"",
        "locations": locations,
    }


def assert_baseline(writer: Writer) -> None:
    """Nothing is in work, and every slot is free or a block's."""
    detail = writer.load().detail
    assert (writer.load().num_running, detail["work_bytes"]) == (0, 0)
    assert detail["free_slots"] + detail["blocks"] == detail["slots"]


@asynccontextmanager
async def desk(*, with_room: bool = True, num_slots: int = 8, seed: int = 1) -> AsyncIterator[tuple[Desk, Writer]]:
    """A writer with slabs of `num_slots`, and who talks with it. At the end nothing may be left in work."""
    world = World(seed)
    bus, bulk = await world.bus("client/c0"), await world.bulk("client/c0")
    if with_room:
        await world.add(Room("k0", await world.bus("kvstore/k0")))
    front = Desk(world, bus, bulk)
    await front.listen()
    await front.start_writer(num_slots)
    writer = world.actors["writer/w0"]
    assert isinstance(writer, Writer)
    yield front, writer
    now = world.actors["writer/w0"]
    assert isinstance(now, Writer)
    assert_baseline(now)
    assert await front.dump() == front.found
    assert bulk.num_offers == 0
    await world.stop()
