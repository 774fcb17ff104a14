"""A store of blocks at work, with nobody else: writer and kvstore on a memory bus, blocks to put there and get back."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from actors.kvstore.actor import KVStore
from actors.prefill.disk import SlabReader, expected_slab
from actors.prefill.restore import Block, Fetched
from actors.rules.chain import KEY_BYTES
from actors.rules.location import LOCATION_BYTES
from actors.rules.ring import Ring
from actors.writer.actor import Writer
from bus.blocks import BlockStore
from bus.bulk import Bulk
from bus.bus import Bus
from bus.files import PosixFiles
from bus.subjects import DUMP, STORE
from kernels.engine import EngineInfo
from run.bench.rig import Rig
from schemas.cache import CachedPrefix, DumpBlocks, StoreBlocks

NUM_SINGLES = 200
"""Blocks put, and got, one at a time."""

PROMPT_BLOCKS = 32
"""Of what is put in one go, as a prefill step would."""

BUDGET_BYTES = 1 << 40
SPACE = "bench"
ROOT = bytes(KEY_BYTES)
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Blocks:
    """A chain of blocks, and the bytes of each."""

    keys: Sequence[bytes]
    payloads: Sequence[bytes]

    @classmethod
    def by_chance(cls, num: int, block_bytes: int) -> Self:
        """Blocks that nothing compresses."""
        return cls([os.urandom(KEY_BYTES) for _ in range(num)], [os.urandom(block_bytes) for _ in range(num)])

    @property
    def num_bytes(self) -> int:
        """Of all payloads."""
        return sum(map(len, self.payloads))


class Store:
    """What a prefill replica does with its writer and its slabs."""

    def __init__(self, bus: Bus, bulk: Bulk, writer: Writer, files: PosixFiles, blocks: Blocks) -> None:
        self._bus = bus
        self._bulk = bulk
        self._writer = writer
        self._blocks = blocks
        info = EngineInfo(
            model="bench",
            layout="bench",
            vocab_size=1,
            eos_token=0,
            max_tokens=1,
            num_slots=1,
            max_step_tokens=1,
            capacity_tokens=1,
            space=SPACE,
            block_bytes=len(blocks.payloads[0]),
        )
        self._expected = expected_slab(info)
        self._reader = SlabReader(files, bus.seams.run_beside)
        self._locations: dict[bytes, bytes] = {}
        self.num_blocks = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, slab_bytes: int, blocks: Blocks) -> AsyncIterator[Self]:
        """Kvstore and writer over this folder, ready; stopped at the end."""
        files = [PosixFiles(folder) for _ in range(3)]
        try:
            async with Rig() as rig:
                await rig.add(KVStore("k0", *await rig.place(), files[0], BUDGET_BYTES))
                writer = Writer("w0", *await rig.place(), files[1], slab_bytes)
                await rig.add(writer)
                while writer.load().detail["unread_slabs"]:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                store = cls(*await rig.place(), writer, files[2], blocks)
                await store.locate()
                yield store
        finally:
            for one in files:
                await one.close()

    async def put(self) -> None:
        """Store all blocks, prompt by prompt, as prefill does; over when the writer has answered for the last."""
        sending: set[asyncio.Task[Any]] = set()

        def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            task = asyncio.create_task(work)
            sending.add(task)
            task.add_done_callback(sending.discard)
            return task

        blocks = self._blocks
        queue = BlockStore(self._bus, self._bulk, Ring(), spawn, max_bytes=blocks.num_bytes)
        queue.on_load(self._writer.load())
        for first in range(0, len(blocks.keys), PROMPT_BLOCKS):
            numbers = range(first, min(first + PROMPT_BLOCKS, len(blocks.keys)))
            keys = [blocks.keys[number] for number in numbers]
            parents = [blocks.keys[number - 1] if number else ROOT for number in numbers]
            payloads = blocks.payloads[numbers.start : numbers.stop]
            queue.store("bench", SPACE, keys, parents, payloads, approximate=False)
        while sending:
            await asyncio.wait(sending)
        if queue.num_stored < len(blocks.keys):
            raise OSError(f"{queue.num_lost} blocks were not stored")

    async def get(self) -> None:
        """Read and check all blocks, as prefill does; `locate` them first."""
        await self._read(self._blocks.keys)

    async def singles(self, before: Callable[[], None]) -> dict[str, float]:
        """Milliseconds of blocks put, then got, one at a time; `before` in between."""
        blocks, put_ms, get_ms = self._blocks, [], []
        for number in range(min(NUM_SINGLES, len(blocks.keys))):
            payload = await self._bulk.wrap(blocks.payloads[number])
            message = StoreBlocks(space=SPACE, keys=os.urandom(KEY_BYTES), parents=ROOT, payloads=payload)
            start_s = time.perf_counter()
            await self._bus.ask(STORE.at(self._writer.id), message, timeout_s=PATIENCE_S)
            put_ms.append((time.perf_counter() - start_s) * 1e3)
        before()
        for key in random.Random(0).sample(blocks.keys, len(put_ms)):
            start_s = time.perf_counter()
            await self._read([key])
            get_ms.append((time.perf_counter() - start_s) * 1e3)
        return {**_quantiles("put_ms", put_ms), **_quantiles("get_ms", get_ms)}

    async def locate(self) -> None:
        """Ask the writer where everything is."""
        dump = await self._bus.ask(DUMP.at(self._writer.id), DumpBlocks(), timeout_s=PATIENCE_S)
        parts = (dump.keys, dump.locations)
        keys, locations = [await self._bulk.unwrap(part, timeout_s=PATIENCE_S) for part in parts]
        self.num_blocks = len(keys) // KEY_BYTES
        for number in range(self.num_blocks):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            self._locations[key] = locations[number * LOCATION_BYTES : (number + 1) * LOCATION_BYTES]

    async def _read(self, keys: Sequence[bytes]) -> None:
        prefix = CachedPrefix(
            space=SPACE,
            root=ROOT,
            keys=b"".join(keys),
            locations=b"".join(self._locations[key] for key in keys),
            num_blocks=len(keys),
        )
        fetched = Fetched(prefix)
        await self._reader.read(fetched, self._expected)
        if not all(isinstance(block, Block) for block in fetched.blocks):
            raise OSError(f"blocks could not be read: {fetched.bad()}")


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {f"{name}_p{part}": round(values[len(values) * part // 100], 3) for part in (50, 99)}
