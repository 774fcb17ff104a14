"""The actors of the KV cache that hold no bytes, around a writer that only says it does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from actors.kvstore.actor import KVStore
from actors.metadata.actor import Metadata
from actors.rules import keys as block_keys
from actors.rules import location
from actors.rules.location import Location
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, Delivery, fail
from bus.memory import MemoryWire
from bus.memory_files import MemoryFiles, MemoryFolder
from bus.subjects import ADOPT, DROP, DROPPED, DUMP, FIND, MAKE_ROOM, STORED, Subject
from run.simulator import RecordingBroker, World
from schemas.bulk import Handle
from schemas.cache import (
    AdoptSlab,
    BlocksDropped,
    BlocksDumped,
    BlocksFound,
    BlocksStored,
    DropBlocks,
    DumpBlocks,
    FindBlocks,
    MakeRoom,
    Snapshot,
)
from schemas.failure import Code
from schemas.message import Role
from schemas.request import Taken
from schemas.routing import LoadReported

SLAB_BYTES = 1000
ROOT = b"a space's root.."


def chain(name: str, num_blocks: int) -> list[bytes]:
    """Keys that look like a chain's."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest()[:16] for number in range(num_blocks)]


class Shelf:
    """What a writer has, wherever it runs: its slots outlive it."""

    def __init__(self, slab: int) -> None:
        self.slabs = {slab}
        self.blocks: dict[int, tuple[bytes, bytes]] = {}  # location: key, parent
        self.next_slot = 0

    def take(self, key: bytes, parent: bytes, *, approximate: bool, slab: int | None = None) -> int:
        """A slot that was never used before, and the block in it."""
        self.next_slot += 1
        where = Location(min(self.slabs) if slab is None else slab, self.next_slot, approximate).pack()
        self.blocks[where] = (key, parent)
        return where


class StandIn(Actor):
    """A writer without files."""

    role = Role.WRITER

    def __init__(self, id: str, bus: Bus, bulk: Bulk, shelf: Shelf) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self.shelf = shelf
        self.seq = 0
        self.num_dumps = 0
        self.adopted: list[str] = []
        self.dropped: list[bytes] = []
        self.dump_gate: asyncio.Event | None = None
        self.bad_dumps: list[str] = []  # what is wrong with the next ones

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {DUMP: self._on_dump, DROP: self._on_drop, ADOPT: self._on_adopt}

    def load(self) -> LoadReported:
        return structs.replace(super().load(), detail={"seq": float(self.seq)})

    async def store(self, keys: Sequence[bytes], parent: bytes = ROOT, *, approximate: bool = False) -> list[int]:
        """A chain behind `parent`; where its blocks are."""
        parents = [parent, *keys[:-1]]
        words = [self.shelf.take(*pair, approximate=approximate) for pair in zip(keys, parents, strict=True)]
        self.seq += 1
        event = BlocksStored(
            writer=self.id,
            incarnation=self.incarnation,
            seq=self.seq,
            keys=b"".join(keys),
            parents=b"".join(parents),
            locations=np.array(words, dtype="<u8").tobytes(),
        )
        await self.bus.tell(STORED.at(self.role), event)
        return words

    async def drop(self, words: Sequence[int]) -> None:
        """Free these slots."""
        keys = [self.shelf.blocks.pop(word)[0] for word in words]
        self.dropped += keys
        self.seq += 1
        packed = np.array(words, dtype="<u8").tobytes()
        event = BlocksDropped(
            writer=self.id, incarnation=self.incarnation, seq=self.seq, keys=b"".join(keys), locations=packed
        )
        await self.bus.tell(DROPPED.at(self.role), event)

    async def _on_dump(self, dump: DumpBlocks, envelope: Envelope) -> BlocksDumped:
        self.num_dumps += 1
        wrong = self.bad_dumps.pop(0) if self.bad_dumps else ""
        if wrong == "refused":
            raise fail(Code.INTERNAL, "no dump for you")
        words, pairs = list(self.shelf.blocks), list(self.shelf.blocks.values())
        keys, parents = b"".join(key for key, _ in pairs), b"".join(parent for _, parent in pairs)
        if dump.shards:
            ours = block_keys.owners(block_keys.keys(keys), dump.shards) == dump.shards.index(dump.shard)
            keys = block_keys.keys(keys)[ours].tobytes()
            words, parents = np.array(words, dtype=np.uint64)[ours].tolist(), b""
        if wrong == "short":
            words = words[1:]
        dumped = BlocksDumped(
            writer=self.id,
            incarnation=self.incarnation,
            seq=self.seq,
            slabs=[-1] if wrong == "slabs" else sorted(self.shelf.slabs),
            keys=await self._bulk.wrap(keys),
            parents=await self._bulk.wrap(parents),
            locations=await self._bulk.wrap(np.array(words, dtype="<u8").tobytes()),
        )
        if self.dump_gate is not None:
            self.spawn(self._answer_later(dumped, envelope, self.dump_gate))
            return None  # type: ignore[return-value]
        return dumped

    async def _answer_later(self, dumped: BlocksDumped, envelope: Envelope, gate: asyncio.Event) -> None:
        await gate.wait()
        await envelope.answer(dumped)

    async def _on_drop(self, drop: DropBlocks, envelope: Envelope) -> Taken:
        words = location.words(drop.locations).tolist()
        keys = [drop.keys[start : start + 16] for start in range(0, len(drop.keys), 16)]
        there = [w for w, key in zip(words, keys, strict=True) if self.shelf.blocks.get(w, (b"",))[0] == key]
        if there:
            await self.drop(there)
        return Taken()

    async def _on_adopt(self, adopt: AdoptSlab, envelope: Envelope) -> Taken:
        self.adopted.append(adopt.name)
        return Taken()


class LossyBroker(RecordingBroker):
    """What becomes of each message whose subject `is_hit`: lost, doubled, late (it comes after the next one) or none
    of these, in turn."""

    def __init__(self, is_hit: Callable[[str], bool], fates: str) -> None:
        super().__init__()
        self._is_hit = is_hit
        self._fates = fates
        self._count = 0
        self._late: list[tuple[MemoryWire, Delivery]] = []

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if not self._is_hit(delivery.subject):
            super().publish(source, delivery)
            return
        fate = self._fates[self._count % len(self._fates)]
        self._count += 1
        if fate == "r":
            self._late.append((source, delivery))
            return
        for _ in range({"l": 0, "d": 2, ".": 1}[fate]):
            super().publish(source, delivery)
        late, self._late = self._late, []
        for held in late:
            super().publish(*held)


class Cache(World):
    """A world with metadata shards and writers, and a client."""

    client: Bus

    async def with_metadata(self, id: str) -> Metadata:
        name = f"metadata/{id}"
        shard = Metadata(id, await self.bus(name), await self.bulk(name))
        await self.add(shard)
        return shard

    async def with_writer(self, id: str, shelf: Shelf) -> StandIn:
        name = f"writer/{id}"
        writer = StandIn(id, await self.bus(name), await self.bulk(name), shelf)
        await self.add(writer)
        return writer

    async def with_kvstore(self, id: str, folder: MemoryFolder, budget_bytes: int) -> KVStore:
        name = f"kvstore/{id}"
        store = KVStore(id, await self.bus(name), await self.bulk(name), MemoryFiles(folder), budget_bytes)
        await self.add(store)
        return store

    async def make_room(self, writer: str, num_slots: int, slab_bytes: int = SLAB_BYTES) -> bool:
        """Whether the writer may add a slab."""
        room = MakeRoom(writer=writer, num_slots=num_slots, slab_bytes=slab_bytes)
        made = await self.client.ask(MAKE_ROOM.any(), room, timeout_s=5)
        return made.may_add

    async def find(self, id: str, keys: Sequence[bytes]) -> BlocksFound:
        return await self.client.ask(FIND.at(id), FindBlocks(keys=b"".join(keys)), timeout_s=5)

    async def found(self, id: str, keys: Sequence[bytes]) -> list[int]:
        """The locations of the keys that are found, each asked for by itself; -1 for none."""
        answers = [await self.find(id, [key]) for key in keys]
        return [int.from_bytes(answer.locations, "little") if answer.locations else -1 for answer in answers]


C = TypeVar("C", bound=Cache)


@asynccontextmanager
async def cache(broker: RecordingBroker | None = None, kind: type[C] = Cache) -> AsyncIterator[C]:  # type: ignore[assignment]
    """An empty one."""
    world = kind(0, broker)
    world.client = await world.bus("client")
    try:
        yield world
    finally:
        await world.stop()


def snapshot(key: bytes, holder: str = "prefill/p0", expires_ns: int = 10**15, **fields: Any) -> Snapshot:
    handle = Handle(address="mem://1", key="k", generation=1, size_bytes=1, checksum=0)
    return Snapshot(key=key, holder=holder, handle=handle, expires_ns=expires_ns, **fields)
