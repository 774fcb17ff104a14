"""What it takes to name the blocks of a prompt and to find where they are."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from actors.entrypoint.lookup import gather, scatter
from actors.metadata.actor import Metadata
from actors.rules.blocks import BlockTable
from actors.rules.chain import BLOCK_TOKENS, KEY_BYTES, chain, root
from actors.rules.keys import keys as as_keys
from actors.rules.keys import owners
from actors.rules.location import Location
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus
from bus.lookup import Lookups
from bus.subjects import DUMP, Subject
from run.bench.rig import Rig
from schemas.cache import BlocksDumped, DumpBlocks
from schemas.message import Role

NUM_TOKENS = 1 << 20
NUM_ROUNDS = 9
NUM_SHARDS = 2
NUM_KNOWN = 1 << 20
"""Blocks known to the shards beside those looked up."""

Progress = Callable[[float], None]


async def measure_index(progress: Progress = lambda done: None) -> dict[str, Any]:
    """Milliseconds to name and to find the 8,192 blocks of a prompt of 1 M tokens, beside the hash alone."""
    tokens = np.random.default_rng(0).integers(0, 131_072, NUM_TOKENS, dtype=np.uint32)
    found = await asyncio.to_thread(_hash, tokens)
    progress(0.3)
    wanted = b"".join(chain(root("bench"), tokens))
    known = np.random.default_rng(1).integers(0, 1 << 64, (NUM_KNOWN, 2), dtype=np.uint64)
    found.update(_table(known, wanted))
    progress(0.5)
    found.update(await _shards(known.astype("<u8").tobytes(), wanted))
    progress(1.0)
    return found


def _hash(tokens: np.ndarray[Any, np.dtype[np.uint32]]) -> dict[str, float]:
    """The chain, and the hash of the very same messages, each in one call; and of all their bytes in one call."""
    first = root("bench")
    keys = [first, *chain(first, tokens)]
    data = tokens.astype("<u4").tobytes()
    size = 4 * BLOCK_TOKENS
    messages = [key + data[i * size : (i + 1) * size] for i, key in enumerate(keys[:-1])]
    joined = b"".join(messages)
    sha256 = hashlib.sha256

    def raw() -> None:
        for message in messages:
            sha256(message).digest()

    works: dict[str, Callable[[], Any]] = {
        "hash_ms_1m_tokens": lambda: chain(first, tokens),
        "raw_hash_ms_1m_tokens": raw,
        "one_shot_hash_ms_1m_tokens": lambda: sha256(joined).digest(),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(NUM_ROUNDS):
        for name, work in works.items():
            start_s = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start_s)
    return {name: round(statistics.median(seconds) * 1e3, 2) for name, seconds in taken.items()}


def _table(known: Any, wanted: bytes) -> dict[str, float]:
    """One table of all blocks, without a bus: time to find, bytes to hold."""
    table = BlockTable()
    table.put(known, np.arange(len(known), dtype=np.uint64))
    keys = as_keys(wanted)
    table.put(keys, np.arange(len(keys), dtype=np.uint64))
    taken = []
    for _ in range(NUM_ROUNDS):
        start_s = time.perf_counter()
        assert table.find(keys)[1].all()
        taken.append(time.perf_counter() - start_s)
    return {
        "table_ms_8192_blocks": round(statistics.median(taken) * 1e3, 2),
        "metadata_bytes_per_block": round(table.size_bytes / len(table), 1),
    }


class _Holder(Actor):
    """A writer of which nothing is wanted but a dump."""

    role = Role.WRITER

    def __init__(self, id: str, bus: Bus, bulk: Bulk, keys: bytes) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self._keys = keys

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {DUMP: self._on_dump}

    async def _on_dump(self, dump: DumpBlocks, envelope: Envelope) -> BlocksDumped:
        keys = as_keys(self._keys)
        ours = keys[owners(keys, dump.shards) == dump.shards.index(dump.shard)]
        locations = np.full(len(ours), Location(slab=1, slot=0).pack(), dtype="<u8")
        return BlocksDumped(
            writer=self.id,
            incarnation=self.incarnation,
            seq=0,
            slabs=[1],
            keys=await self._bulk.wrap(ours.astype("<u8").tobytes()),
            parents=await self._bulk.wrap(b""),
            locations=await self._bulk.wrap(locations.tobytes()),
        )


async def _shards(known: bytes, wanted: bytes) -> dict[str, float]:
    """One scatter-gather to shards on a memory bus, as an entrypoint does it, every byte encoded and decoded."""
    ids = [f"m{number}" for number in range(NUM_SHARDS)]
    taken = []
    async with Rig() as rig:
        shards = [Metadata(id, *await rig.place()) for id in ids]
        for actor in (*shards, _Holder("w0", *await rig.place(), known + wanted)):
            await rig.add(actor)
        lookups = Lookups((await rig.place())[0])
        num_all = (len(known) + len(wanted)) // KEY_BYTES
        while sum(shard.load().detail["blocks"] for shard in shards) < num_all:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for _ in range(NUM_ROUNDS):
            start_s = time.perf_counter()
            questions = scatter(wanted, ids)
            answers = await lookups.find("r", {shard: question.message for shard, question in questions.items()})
            assert gather(wanted, questions, answers, 0).num_blocks == len(wanted) // KEY_BYTES, "a shard was silent"
            taken.append(time.perf_counter() - start_s)
    return {"lookup_ms_8192_blocks": round(statistics.median(taken) * 1e3, 2)}
