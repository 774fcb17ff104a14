"""Whose windows a metadata shard tells of: such that are there, as far as it can know."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from actors.metadata.actor import MAX_HINTS
from actors.rules import keys as block_keys
from bus.actor import Actor, Handler
from bus.subjects import EXITED, KEPT, Subject
from run.virtual import run_virtual
from schemas.cache import SnapshotsKept
from schemas.liveness import ProcessExited
from schemas.message import Role
from tests.actors.shelf import Cache, Shelf, cache, chain, snapshot

QUIET_S = 12.0


class Holder(Actor):
    """Who has snapshots, as far as the directory is concerned."""

    role = Role.PREFILL

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {}


async def kept(world: Cache, keys: list[bytes], holder: str, **fields: object) -> None:
    await world.client.tell(KEPT.at("m0"), SnapshotsKept(snapshots=[snapshot(key, holder, **fields) for key in keys]))  # type: ignore[arg-type]


def test_snapshots_of_the_last_blocks_found_come_with_them() -> None:
    async def main() -> None:
        async with cache() as world:
            shard = await world.with_metadata("m0")
            writer = await world.with_writer("w0", Shelf(7))
            await writer.store(keys := chain("a", 10))
            await kept(world, [*keys[2:9], *chain("b", 1)], "prefill/p0")
            await kept(world, keys[9:], "prefill/p0", expires_ns=int(20e9))
            await asyncio.sleep(1)
            numbers = [number for number, _ in (await world.find("m0", keys)).snapshots]
            assert numbers == [6, 7, 8, 9] and len(numbers) == MAX_HINTS
            assert [number for number, _ in (await world.find("m0", keys[:4])).snapshots] == [2, 3]
            assert shard.load().detail["snapshots"] == 9
            await asyncio.sleep(25)
            assert [number for number, _ in (await world.find("m0", keys)).snapshots] == [5, 6, 7, 8]

    run_virtual(main())


@pytest.mark.parametrize("end", ["exited", "silence", "restart"])
def test_snapshots_go_with_their_holder(end: str) -> None:
    async def main() -> None:
        async with cache() as world:
            await world.with_metadata("m0")
            writer = await world.with_writer("w0", Shelf(7))
            await writer.store(keys := chain("a", 3))
            await world.add(Holder("p0", await world.bus("prefill/p0")))
            await world.add(Holder("p1", await world.bus("prefill/p1")))
            await kept(world, keys[:2], "prefill/p0")
            await kept(world, keys[2:], "prefill/p1")
            await asyncio.sleep(QUIET_S)
            assert len((await world.find("m0", keys)).snapshots) == 3
            world.kill("prefill/p0")
            if end == "exited":
                exited = ProcessExited(name="prefill", pid=1, members=["prefill/p0"])
                await world.client.tell(EXITED.all(), exited)
            elif end == "restart":
                await world.add(Holder("p0", await world.bus("prefill/p0")))
            await asyncio.sleep(QUIET_S if end == "silence" else 0.1)
            assert [number for number, _ in (await world.find("m0", keys)).snapshots] == [2]

    run_virtual(main())


def test_snapshots_of_other_shards_are_let_go_when_one_joins() -> None:
    async def main() -> None:
        async with cache() as world:
            shard = await world.with_metadata("m0")
            await kept(world, keys := chain("a", 60), "prefill/p0")
            await asyncio.sleep(0.1)
            await world.with_metadata("m1")
            await asyncio.sleep(0.1)
            ours = int((block_keys.owners(block_keys.keys(b"".join(keys)), ["m0", "m1"]) == 0).sum())
            assert 0 < ours < 60 and shard.load().detail["snapshots"] == ours

    run_virtual(main())
