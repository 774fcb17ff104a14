"""The writer on a real folder, with threads."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.rules.slab import Slab, SlotError, read_slot
from actors.writer.actor import Writer
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, BusError
from bus.files import PosixFiles
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import STORE
from schemas.bulk import Payload
from schemas.cache import StoreBlocks
from tests.actors.writing import TIMEOUT_S, Room, key, payload, slab_bytes
from tests.conftest import Run

SIZE = 10_176
NUM_SLOTS = 64


@asynccontextmanager
async def writing(folder: Path) -> AsyncIterator[tuple[Writer, Bus]]:
    """A writer of this folder, ready, and someone to ask it."""
    broker, files, hub = MemoryBroker(), PosixFiles(folder), MemoryHub()
    buses = [Bus(MemoryWire(broker)) for _ in range(3)]
    for bus in buses:
        await bus.open()
    writer = Writer("w0", buses[0], MemoryBulk(hub), files, NUM_SLOTS * (SIZE + 64) + 64)
    running = []
    for actor in (Room("k0", buses[1]), writer):
        ready = asyncio.Event()
        running.append(asyncio.create_task(actor.run(ready.set)))
        await ready.wait()
    async with asyncio.timeout(TIMEOUT_S):
        while writer.load().detail["unread_slabs"]:
            await asyncio.sleep(0)
    yield writer, buses[2]
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await files.close()
    for bus in buses:
        await bus.close()


async def store(bus: Bus, *numbers: int) -> int:
    message = StoreBlocks(
        space="real",
        keys=b"".join(map(key, numbers)),
        parents=b"".join(key(number - 1) for number in numbers),
        payloads=Payload(inline=b"".join(payload(number, SIZE) for number in numbers)),
    )
    return (await bus.ask(STORE.at("w0"), message, timeout_s=TIMEOUT_S)).num_new


def contents(folder: Path) -> dict[bytes, bytes]:
    """All whole slots of all files, as anyone can read them."""
    found = {}
    for path in folder.glob("*.w0.slab"):
        data = path.read_bytes()
        slab = Slab.unpack(data)
        assert len(data) == slab.file_bytes
        for number in range(slab.num_slots):
            try:
                slot = read_slot(data[slab.offset(number) :], slab)
            except SlotError:
                continue
            found[slot.header.key] = bytes(slot.payload)
    return found


def expected(*numbers: int) -> dict[bytes, bytes]:
    return {key(number): payload(number, SIZE) for number in numbers}


def test_what_is_stored_is_on_the_disk_and_found_again(run_async: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    async def main() -> None:
        async with writing(folder) as (writer, bus):
            stores = [store(bus, *range(first, first + 10)) for first in range(0, 50, 10)]
            assert sum(await asyncio.gather(*stores)) == 50
            assert contents(folder) == expected(*range(50))
        async with writing(folder) as (writer, bus):
            assert writer.slots.num_blocks == 50
            assert await store(bus, *range(45, 55)) == 5
            assert contents(folder) == expected(*range(55))

    run_async(main())


def test_a_deleted_folder_is_made_anew(run_async: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    async def main() -> None:
        async with writing(folder) as (writer, bus):
            await store(bus, 1, 2)
            shutil.rmtree(folder)
            with pytest.raises(BusError, match="could not write"):
                await store(bus, 3)
            assert writer.slots.num_blocks == 0
            assert await store(bus, 4, 5) == 2
            assert contents(folder) == expected(4, 5)

    run_async(main())


def test_a_folder_that_cannot_be_made_is_said(run_async: Run, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"in the way")

    async def main() -> None:
        files = PosixFiles(blocked / "cache")
        with pytest.raises(NotADirectoryError):
            await files.create("a.slab", slab_bytes(1))
        await files.close()

    run_async(main())
