"""Writers with files, kvstore and metadata shards together: what is found is there, byte by byte."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import pytest

from actors.kvstore.actor import KVStore
from actors.rules.location import Location, parse_name
from actors.rules.ring import Ring
from actors.rules.slab import HEADER_BYTES, Slab, read_slot
from actors.writer.actor import Writer
from bus.bus import BusError
from bus.memory_files import MemoryFiles, MemoryFolder
from bus.subjects import STORE, TOUCHED
from run.virtual import run_virtual
from schemas.bulk import Payload
from schemas.cache import BlocksTouched, StoreBlocks
from schemas.message import Role
from tests.actors.shelf import ROOT, Cache, cache, chain

PAYLOAD_BYTES = 256
SLAB_BYTES = 32 * (HEADER_BYTES + PAYLOAD_BYTES) + HEADER_BYTES
BUDGET_BYTES = 6 * SLAB_BYTES


def payload(key: bytes) -> bytes:
    return hashlib.shake_256(key).digest(PAYLOAD_BYTES)


class Store(Cache):
    """Two writers, a shard and a kvstore over one folder."""

    folder: MemoryFolder

    async def with_files(self, id: str) -> Writer:
        name = f"writer/{id}"
        writer = Writer(id, await self.bus(name), await self.bulk(name), MemoryFiles(self.folder), SLAB_BYTES)
        await self.add(writer)
        return writer

    async def store(self, keys: Sequence[bytes], parent: bytes = ROOT) -> int:
        """A chain, each block at the writer that owns it; how many could not be stored."""
        ring = Ring()
        for id in ("w0", "w1"):
            ring.saw(id, "", 0.0)
        owners, parents, num_lost = ring.of(keys, 0.0), [parent, *keys[:-1]], 0
        for key, of, id in zip(keys, parents, owners, strict=True):
            block = StoreBlocks(space="s", keys=key, parents=of, payloads=Payload(inline=payload(key)))
            try:
                await self.client.ask(STORE.at(id), block, timeout_s=5)
            except BusError:
                num_lost += 1
        return num_lost

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those found, each of which is read as prefill does."""
        here = []
        for key, word in zip(keys, await self.found("m0", keys), strict=True):
            if word >= 0:
                number, slot, _ = Location.unpack(word)
                (name,) = [name for name in self.folder.files if (parse_name(name) or (-1,))[0] == number]
                data = bytes(self.folder.files[name])
                slab = Slab.unpack(data)
                assert bytes(read_slot(data[slab.offset(slot) :], slab, key).payload) == payload(key)
                here.append(key)
        return here


async def start(world: Store, disk_bytes: float = float("inf")) -> None:
    world.folder = MemoryFolder(disk_bytes)
    await world.with_kvstore("k0", world.folder, BUDGET_BYTES)
    await world.with_metadata("m0")
    for id in ("w0", "w1"):
        await world.with_files(id)
    await asyncio.sleep(1.0)


def is_closed(keys: Sequence[bytes], here: Sequence[bytes]) -> bool:
    """Of a chain, its beginning is here and nothing else."""
    return list(here) == list(keys[: len(here)])


def test_a_full_store_goes_on_with_what_is_used() -> None:
    """Twice as many blocks as fit: the oldest ends of chains make room, one chain in use stays."""

    async def main() -> None:
        async with cache(kind=Store) as world:
            await start(world)
            used, chains, num_lost = chain("used", 16), [chain(f"{n}", 16) for n in range(22)], 0
            assert await world.store(used) == 0
            for keys in chains:
                num_lost += await world.store(keys)
                await world.client.tell(TOUCHED.at(Role.ENTRYPOINT), BlocksTouched(keys=b"".join(used)))
                await asyncio.sleep(2.0)
            assert num_lost == 0, "room is asked for before it runs out"
            assert sum(map(len, world.folder.files.values())) <= BUDGET_BYTES
            here = [await world.present(keys) for keys in chains]
            assert await world.present(used) == used
            assert 90 < sum(map(len, here)) <= 6 * 32 and here[0] == []
            assert all(is_closed(keys, some) for keys, some in zip(chains, here, strict=True))

    run_virtual(main())


def test_a_disk_that_is_smaller_than_the_budget_is_used_as_one_that_is_full() -> None:
    async def main() -> None:
        async with cache(kind=Store) as world:
            await start(world, disk_bytes=4 * SLAB_BYTES)
            chains, num_lost = [chain(f"{n}", 16) for n in range(16)], 0
            for keys in chains:
                num_lost += await world.store(keys)
                await asyncio.sleep(2.0)
            assert num_lost == 0
            assert len(world.folder.files) == 4
            here = [await world.present(keys) for keys in chains]
            assert here[0] == [] and here[-1] == chains[-1]

    run_virtual(main())


def test_a_writer_that_finds_no_place_on_the_disk_costs_the_others_nothing() -> None:
    async def main() -> None:
        async with cache(kind=Store) as world:
            await start(world, disk_bytes=2 * SLAB_BYTES)
            keys = chain("a", 16)
            assert await world.store(keys) == 0
            await world.with_files("w2")
            block = StoreBlocks(space="s", keys=bytes(16), parents=bytes(16), payloads=Payload(inline=payload(b"")))
            for _ in range(5):
                with pytest.raises(BusError):
                    await world.client.ask(STORE.at("w2"), block, timeout_s=5)
                await asyncio.sleep(2.0)
            assert await world.present(keys) == keys

    run_virtual(main())


def test_kill_each_in_turn_and_nothing_live_is_overwritten() -> None:
    """Shard, kvstore and writers come back under load; each block that is found has its own bytes (`present`)."""

    async def main() -> None:
        async with cache(kind=Store) as world:
            await start(world)
            chains = [chain(f"{n}", 16) for n in range(20)]
            for number, keys in enumerate(chains):
                name = ("metadata/m0", "kvstore/k0", "writer/w0", "writer/w1")[number % 4]
                world.kill(name)
                await world.store(keys[:4])
                role, id = name.split("/")
                if role == "metadata":
                    await world.with_metadata(id)
                elif role == "kvstore":
                    await world.with_kvstore(id, world.folder, BUDGET_BYTES)
                else:
                    await world.with_files(id)
                await asyncio.sleep(3.0)
                await world.store(keys)
                await world.store(keys)  # what could not be stored the first time
                await asyncio.sleep(1.0)
                for some in chains[: number + 1]:
                    await world.present(some)
            assert sum(map(len, world.folder.files.values())) <= BUDGET_BYTES
            assert len(await world.present(chains[-1])) == 16

    run_virtual(main())


def test_a_folder_that_vanishes_is_forgotten_by_all_and_filled_again() -> None:
    async def main() -> None:
        async with cache(kind=Store) as world:
            await start(world)
            old, new = chain("old", 16), chain("new", 16)
            assert await world.store(old) == 0
            world.folder.files.clear()
            await world.store(new)
            await asyncio.sleep(3.0)
            assert await world.found("m0", old) == [-1] * 16
            assert await world.store(old) == await world.store(new) == 0
            await asyncio.sleep(1.0)
            assert await world.present(old) == old and await world.present(new) == new

    run_virtual(main())


def test_slabs_of_a_writer_that_never_comes_back_are_found_at_another() -> None:
    async def main() -> None:
        async with cache(kind=Store) as world:
            await start(world)
            keys = chain("a", 30)
            assert await world.store(keys) == 0
            await asyncio.sleep(1.0)
            world.kill("writer/w1")
            await asyncio.sleep(10.0)
            assert await world.present(keys) == keys, "readers need no writer"
            await asyncio.sleep(120.0)
            assert {parse_name(name)[1] for name in world.folder.files} == {"w0"}  # type: ignore[index]
            assert await world.present(keys) == keys
            shard, store = world.actors["metadata/m0"], world.actors["kvstore/k0"]
            assert shard.load().detail["blocks"] == store.load().detail["blocks"] == 30

    run_virtual(main())


@pytest.mark.parametrize("unheard_by", ["all", "kvstore"])
def test_a_writer_that_was_silent_for_long_has_lost_its_slabs_and_nothing_else(
    unheard_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and believes that they are its own: what it says of them is not said of those who adopted them."""

    async def main() -> None:
        async with cache(kind=Store) as world:
            await start(world)
            keys, more = chain("a", 30), chain("b", 16)
            assert await world.store(keys) == 0
            store, shard = world.actors["kvstore/k0"], world.actors["metadata/m0"]
            assert isinstance(store, KVStore)
            with monkeypatch.context() as patch:
                if unheard_by == "all":
                    patch.setattr(world.actors["writer/w1"], "report_load", _say_nothing)
                else:
                    heard = store._writers.heard
                    patch.setattr(store._writers, "heard", lambda load, now_s: load.id == "w1" or heard(load, now_s))
                await asyncio.sleep(120.0)
                assert {parse_name(name)[1] for name in world.folder.files} == {"w0"}  # type: ignore[index]
            await asyncio.sleep(5.0)
            assert await world.store(more) == 0
            await asyncio.sleep(5.0)
            assert await world.present(more) == more
            assert await world.present(keys) == keys
            num_kept = sum(world.actors[f"writer/{id}"].load().detail["blocks"] for id in ("w0", "w1"))
            assert shard.load().detail["blocks"] == store.load().detail["blocks"] == num_kept == 46

    run_virtual(main())


async def _say_nothing() -> None:
    pass
