"""Writers, kvstore and metadata for hours of trouble by chance: when it is over, all agree on what there is."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from actors.kvstore.actor import KVStore
from actors.metadata.actor import Metadata
from actors.rules import keys as block_keys
from actors.writer.actor import Writer
from bus.bus import BusError
from bus.memory_files import MemoryFiles, MemoryFolder, Operation
from bus.subjects import DUMP, STORE, TOUCHED
from run.virtual import run_virtual
from schemas.bulk import Payload
from schemas.cache import BlocksTouched, DumpBlocks, StoreBlocks
from schemas.message import Role
from tests.actors.shelf import ROOT, LossyBroker, cache, chain
from tests.actors.test_store_system import SLAB_BYTES, Store, payload

WRITERS = ("w0", "w1", "w2")
NUM_STEPS = 60
OPERATIONS: Sequence[Operation] = ("list", "create", "read", "write", "rename", "remove")


class Chaos:
    """One history, told by a seed."""

    def __init__(self, world: Store, draw: random.Random) -> None:
        self.world = world
        self.draw = draw
        self.budget_bytes = draw.choice([3, 6]) * SLAB_BYTES
        self.tasks: list[asyncio.Task[None]] = []
        self.chains = [chain(f"{number}", draw.randint(1, 20)) for number in range(20)]

    async def start(self) -> None:
        self.world.folder = MemoryFolder(self.draw.choice([float("inf"), 4 * SLAB_BYTES]))
        for name in ("kvstore/k0", "metadata/m0", "metadata/m1", *(f"writer/{id}" for id in WRITERS)):
            await self.begin(name)

    async def begin(self, name: str) -> None:
        role, id = name.split("/")
        if role == "metadata":
            await self.world.with_metadata(id)
        elif role == "kvstore":
            await self.world.with_kvstore(id, self.world.folder, self.budget_bytes)
        else:
            await self.world.with_files(id)

    async def step(self) -> None:
        """Mostly a store, at any writer: so blocks are at several of them, of several qualities."""
        what, draw = self.draw.random(), self.draw
        if what < 0.7:
            keys = draw.choice(self.chains)
            first = draw.randrange(len(keys))
            storing = self.store(draw.choice(WRITERS), [ROOT, *keys][first : draw.randint(first + 2, len(keys) + 1)])
            self.tasks.append(asyncio.create_task(storing))
            if what < 0.35:
                await self.tasks[-1]
        elif what < 0.75:
            touched = BlocksTouched(keys=b"".join(draw.choice(self.chains)))
            await self.world.client.tell(TOUCHED.at(Role.ENTRYPOINT), touched)
        elif what < 0.85:
            name = draw.choice(list(self.world.actors))
            self.world.kill(name)
            await asyncio.sleep(draw.choice([0.1, 3.0, 10.0, 100.0]))
            await self.begin(name)
        elif what < 0.92:
            files = draw.choice(self.files())
            for _ in range(draw.choice([1, 1, 5])):
                files.fail_next(OSError(draw.choice([errno.EIO, errno.ENOSPC]), "no"), draw.choice(OPERATIONS))
        else:
            self.tasks.append(asyncio.create_task(self.silence(draw.choice(self.writers()), draw.choice([5, 70, 120]))))
            await asyncio.sleep(draw.choice([0.1, 60.0, 100.0]))
        await asyncio.sleep(draw.choice([0, 0.01, 0.5, 3.0]))

    async def store(self, writer: str, keys: Sequence[bytes]) -> None:
        """The blocks behind the first of a chain."""
        block = StoreBlocks(
            space="s",
            keys=b"".join(keys[1:]),
            parents=b"".join(keys[:-1]),
            payloads=Payload(inline=b"".join(map(payload, keys[1:]))),
            approximate=self.draw.random() < 0.3,
        )
        with suppress(BusError):  # trouble is wanted here
            await self.world.client.ask(STORE.at(writer), block, timeout_s=5)

    async def silence(self, writer: Writer, seconds: float) -> None:
        """It lives, and is not heard of."""
        writer.report_load = _say_nothing  # type: ignore[method-assign]
        await asyncio.sleep(seconds)
        writer.__dict__.pop("report_load", None)

    async def settle(self) -> None:
        for files in self.files():
            files.heal()
        await asyncio.gather(*self.tasks)
        await asyncio.sleep(150.0)
        for id in WRITERS:  # whoever was silent, and asked for nothing since, sees what is gone
            await self.world.client.ask(DUMP.at(id), DumpBlocks(), timeout_s=5)
        await asyncio.sleep(30.0)

    def writers(self) -> list[Writer]:
        return [actor for actor in self.world.actors.values() if isinstance(actor, Writer)]

    def files(self) -> list[MemoryFiles]:
        found = [writer._disk.files for writer in self.writers()]
        return [files for files in found if isinstance(files, MemoryFiles)]

    def check(self) -> None:
        """Every slot and every file is somebody's; kvstore and metadata know each block, and no other."""
        at: dict[bytes, tuple[str, int]] = {}
        held = set()
        for writer in self.writers():
            detail, dump = writer.load().detail, writer.slots.dump()
            assert detail["free_slots"] + detail["blocks"] + len(writer.slots._stuck) == detail["slots"]
            held |= {slab.name for slab in writer.slots.slabs}
            for key, location in zip(dump.keys, dump.locations.tolist(), strict=True):
                assert key.tobytes() not in at, "the kvstore leaves no block at two writers"
                at[key.tobytes()] = (writer.id, location)
        (store,) = (actor for actor in self.world.actors.values() if isinstance(actor, KVStore))
        assert store._store.reclaim.num_blocks == len(at)
        shards = [actor._shard for actor in self.world.actors.values() if isinstance(actor, Metadata)]
        self.missing: list[tuple[bytes, str]] = []
        num_told = 0
        for key, (id, location) in at.items():
            found, there = store._store.reclaim.find(block_keys.keys(key))
            assert there[0] and int(found[0]) == location
            (shard,) = (shard for shard in shards if shard.owns(block_keys.keys(key))[0])
            told = shard.find(block_keys.keys(key)).tolist()
            assert told in ([], [location])
            num_told += len(told)
            if not told:
                self.missing.append((key, id))
        assert sum(shard.num_blocks for shard in shards) == num_told, "nothing is told that is not there"
        assert held <= self.world.folder.files.keys()
        num_left = sum(len(writer._disk._left) for writer in self.writers())
        assert len(self.world.folder.files) - len(held) <= num_left, "files that nobody looks after"


async def _say_nothing() -> None:
    pass


def is_event(subject: str) -> bool:
    return subject.endswith((".writer.stored", ".writer.dropped"))


@pytest.mark.parametrize("seed", range(6))
def test_when_trouble_is_over_all_agree(seed: int) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        fates = "".join(draw.choice("...ldr") for _ in range(draw.choice([1, 7, 30])))
        async with cache(LossyBroker(is_event, fates), kind=Store) as world:
            chaos = Chaos(world, draw)
            await chaos.start()
            for _ in range(NUM_STEPS):
                await chaos.step()
            await chaos.settle()
            chaos.check()
            # Of two copies, metadata may have heard in another order than the kvstore: it learns when one is offered.
            for key, id in chaos.missing:
                await chaos.store(id, [ROOT, key])
            await asyncio.sleep(5.0)
            chaos.check()
            assert chaos.missing == []

    run_virtual(main())
