"""One prefill replica among stand-ins for all it talks to, and a folder of slabs that a test can damage."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from msgspec import structs

from actors.prefill.actor import Prefill
from actors.rules.chain import BLOCK_TOKENS, KEY_BYTES, chain, root
from actors.rules.hit import exact_ends, usable_blocks
from actors.rules.location import Location, file_name
from actors.rules.slab import Slab
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.files import Files
from bus.memory_files import MemoryFiles
from bus.subjects import (
    CANCEL_PREFILL,
    DISPATCH,
    FAILED,
    HAND_OVER,
    KEPT,
    RELEASE_DECODE,
    RELEASE_PREFILL,
    RESEND_DECODE,
    ROUTE_DECODE,
    SHORTENED,
    STORE,
    TOKENS,
    Address,
    Subject,
)
from kernels.engine import EngineInfo, Tokens
from kernels.timed import StepCost, TimedEngine
from run.simulator import World
from schemas.bulk import Payload
from schemas.cache import (
    BlocksFailed,
    BlocksWritten,
    CachedPrefix,
    HitShortened,
    Snapshot,
    SnapshotsKept,
    StoreBlocks,
)
from schemas.failure import Code
from schemas.handover import HandedOver, HandOver
from schemas.message import Role
from schemas.request import Cancel, Resend, Taken, TokensEmitted
from schemas.routing import Release, Route, Routed
from tests.actors.builders import dispatch, pack_slot
from tests.actors.core import VOCABULARY, info

SPACE = "timed"
BLOCK_BYTES = 64
SLAB = 7
NUM_SLOTS = 64


def tokens(num: int, seed: int = 0) -> Tokens:
    """The first `num` of an endless prompt."""
    return np.random.default_rng(seed).integers(3, 999, 4096).astype("<u4")[:num]


class Entry(Actor):
    """In the place of an entrypoint: hears of shortened hits and of failures."""

    role = Role.ENTRYPOINT

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.shortened: dict[str, list[HitShortened]] = {}
        self.failed: list[TokensEmitted] = []
        self.num_ignored = 0

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {SHORTENED: self._on_shortened, TOKENS: self._on_tokens}

    async def _on_shortened(self, shortened: HitShortened, envelope: Envelope) -> Taken | None:
        self.shortened.setdefault(shortened.request_id, []).append(shortened)
        if self.num_ignored:
            self.num_ignored -= 1
            return None
        return Taken()

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        self.failed.append(emitted)
        return Taken()


class Sink(Actor):
    """In the place of decode: takes every state."""

    role = Role.DECODE

    def __init__(self, id: str, bus: Bus, bulk: Bulk) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self.taken: dict[str, tuple[HandOver, bytes]] = {}
        self.order: list[str] = []

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {HAND_OVER: self._on_hand_over, RESEND_DECODE: self._on_resend}

    async def _on_hand_over(self, offer: HandOver, envelope: Envelope) -> None:
        self.spawn(self._take(offer, envelope))

    async def _take(self, offer: HandOver, envelope: Envelope) -> None:
        try:
            state = await self._bulk.pull(offer.state, timeout_s=5)
        except BusError as error:  # withdrawn
            await envelope.answer(error.failure)
            return
        self.taken[offer.request_id] = (offer, state)
        self.order.append(offer.request_id)
        await envelope.answer(HandedOver())

    async def _on_resend(self, resend: Resend, envelope: Envelope) -> TokensEmitted:
        return TokensEmitted(source="decode/d0", request_ids=[], epochs=[], first_indexes=[], counts=[], tokens=[])


class DecodeRoutes(Actor):
    """In the place of the decode balancer."""

    role = Role.DECODE_BALANCER
    num_held = 0

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {ROUTE_DECODE: self._on_route, RELEASE_DECODE: self._on_release}

    async def _on_route(self, route: Route, envelope: Envelope) -> Routed:
        return Routed(replica="d0", reservation=1, balancer="db0")

    async def _on_release(self, release: Release, envelope: Envelope) -> None:
        pass


class PrefillRoutes(Actor):
    """In the place of the prefill balancer."""

    role = Role.PREFILL_BALANCER
    num_released = 0

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RELEASE_PREFILL: self._on_release}

    async def _on_release(self, release: Release, envelope: Envelope) -> None:
        self.num_released += 1


class Shelf(Actor):
    """In the place of a writer: puts each block in the next slot of one slab, at once."""

    role = Role.WRITER
    slab: Slab

    def __init__(self, id: str, bus: Bus, bulk: Bulk, files: Files) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._files = files
        self.name = file_name(SLAB, id)
        self.locations: dict[bytes, Location] = {}
        self.stored: list[StoreBlocks] = []
        self.failed: list[BlocksFailed] = []

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {STORE: self._on_store}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {FAILED.at(Role.PREFILL): self._on_failed}

    async def open(self, info: EngineInfo) -> None:
        """Make the slab, for the blocks of this engine."""
        self.slab = Slab(info.block_bytes, NUM_SLOTS, hashlib.sha256(info.space.encode()).digest()[:16], 1)
        await self._files.create(self.name, self.slab.file_bytes)
        await self._files.write(self.name, [(0, self.slab.pack())])

    async def _on_store(self, store: StoreBlocks, envelope: Envelope) -> BlocksWritten:
        self.stored.append(store)
        payloads, size = await self._bulk.unwrap(store.payloads), self.slab.payload_bytes
        num = len(store.keys) // KEY_BYTES
        for number in range(num):
            key, parent = (keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] for keys in (store.keys, store.parents))
            payload = payloads[number * size : (number + 1) * size]
            data = pack_slot(self.slab, key, parent, payload, approximate=store.approximate)
            location = Location(SLAB, len(self.locations), store.approximate)
            try:
                await self._files.write(self.name, [(self.slab.offset(location.slot), data)])
            except OSError as error:
                raise fail(Code.INTERNAL, str(error)) from None
            self.locations[key] = location
        return BlocksWritten(num_new=num)

    async def _on_failed(self, failed: BlocksFailed, envelope: Envelope) -> None:
        self.failed.append(failed)


class Directory(Actor):
    """In the place of a metadata shard: which snapshots are kept."""

    role = Role.METADATA

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.snapshots: dict[bytes, Snapshot] = {}

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {KEPT: self._on_kept}

    async def _on_kept(self, kept: SnapshotsKept, envelope: Envelope) -> None:
        self.snapshots.update({snapshot.key: snapshot for snapshot in kept.snapshots})


class Stand(World):
    """The parts, by name, and what an entrypoint does with them."""

    engine: TimedEngine
    prefill: Prefill
    entry: Entry
    sink: Sink
    shelf: Shelf
    directory: Directory
    balancer: PrefillRoutes

    async def setup(self, engine: TimedEngine | None) -> None:
        async def bus(name: str) -> Bus:
            return await self.bus(name)

        self.engine = engine or TimedEngine(info(max_tokens=4096, space=SPACE), VOCABULARY)
        self.entry = Entry("e0", await bus("entrypoint/e0"))
        self.sink = Sink("d0", await bus("decode/d0"), await self.bulk("decode/d0"))
        self.balancer = PrefillRoutes("pb0", await bus("prefill-balancer/pb0"))
        self.shelf = Shelf("w0", await bus("writer/w0"), await self.bulk("writer/w0"), self.open_files("writer/w0"))
        self.directory = Directory("m0", await bus("metadata/m0"))
        routes = DecodeRoutes("db0", await bus("decode-balancer/db0"))
        for actor in (self.entry, self.sink, self.balancer, self.shelf, self.directory, routes):
            await self.add(actor)
        await self.add_prefill("p0", self.engine)
        prefill = self.actors["prefill/p0"]
        assert isinstance(prefill, Prefill)
        self.prefill = prefill
        await self.shelf.open(self.engine.info)
        await asyncio.sleep(0.01)

    @property
    def disk(self) -> MemoryFiles:
        """The folder, as the replica sees it."""
        return self.files["prefill/p0"]

    def cached(self, prompt: Tokens, *, space: str = SPACE, **fields: Any) -> CachedPrefix:
        """What an entrypoint would find of a prompt, and say of it."""
        first = root(space)
        keys = chain(first, prompt)
        known = []
        for key in keys:
            if key not in self.shelf.locations:
                break
            known.append(self.shelf.locations[key].pack())
        num_usable = usable_blocks(len(known), len(prompt))
        ends = [(end, self.directory.snapshots.get(keys[end - 1])) for end in exact_ends(num_usable)]
        snapshots = [(end, snapshot) for end, snapshot in ends if snapshot is not None]
        prefix = CachedPrefix(
            space=space,
            root=first,
            keys=b"".join(keys),
            locations=np.array(known, dtype="<u8").tobytes(),
            num_blocks=num_usable if num_usable > 1 or snapshots else 0,
            snapshots=snapshots,
        )
        return structs.replace(prefix, **fields)

    async def send(
        self, id: str, prompt: Tokens, prefix: CachedPrefix | None, *, to: str = "p0", **fields: Any
    ) -> None:
        """Dispatch a prompt."""
        fields = {"prompt": Payload(inline=prompt.tobytes()), "prefix": prefix, **fields}
        message = structs.replace(dispatch(id, len(prompt)), **fields)
        await self.entry.bus.ask(DISPATCH.at(to), message, timeout_s=5)

    async def finish(self, id: str, prompt: Tokens, prefix: CachedPrefix | None, **fields: Any) -> bytes:
        """The state that was handed over; all is quiet then."""
        await self.send(id, prompt, prefix, **fields)
        await self.quiet()
        return self.sink.taken[id][1]

    async def cancel(self, id: str) -> bool:
        cancel = Cancel(request_id=id)
        return (await self.entry.bus.ask(CANCEL_PREFILL.at("p0"), cancel, timeout_s=30)).was_running

    def held(self) -> dict[str, float]:
        """What is zero when nothing goes on."""
        prefill = self.prefill
        held = {
            "reservations": len(prefill.load().reservations),
            "engine": len(self.engine._requests),
            "loading": len(prefill.loader._loading),
            "telling": len(prefill.loader._telling),
            "load bytes": prefill.batch.num_load_bytes,
            "offers": self.bulks["prefill/p0"].num_offers - len(prefill.keeper.snapshots),
            "blocks": prefill.keeper._store.num_bytes,
            "owners": len(prefill.keeper._store._requests),
            "tasks": len(prefill._tasks) - 4,  # the steps, whether they come on, the reports, the heartbeat
        }
        return {name: number for name, number in held.items() if number}

    async def quiet(self, limit_s: float = 30.0) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while self.held() and loop.time() < end_s:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)  # what was told has arrived
        assert not self.held()

    def detail(self, name: str) -> int:
        return int(self.prefill.load().detail[name])


@asynccontextmanager
async def stand(engine: TimedEngine | None = None) -> AsyncIterator[Stand]:
    """All parts, running; whatever a test does, nobody may have ended or been told of a failure."""
    system = Stand(0)
    try:
        await system.setup(engine)
        yield system
        assert not [name for name, task in system.tasks.items() if task.done()]
        assert not system.entry.failed
    finally:
        await system.stop()


async def cold(prompts: Sequence[Tokens], engine: TimedEngine | None = None) -> list[bytes]:
    """The states of these prompts, computed whole."""
    async with stand(engine) as system:
        return [await system.finish(f"r{number}", prompt, None) for number, prompt in enumerate(prompts)]


def blocks(num: int) -> int:
    """Their tokens."""
    return num * BLOCK_TOKENS


SLOW = StepCost(step_ns=10_000_000)
