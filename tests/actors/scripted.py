"""An entrypoint between metadata shards and a prefill replica that do as told; the test is its decode replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from msgspec import structs

from actors.entrypoint.actor import Entrypoint
from actors.rules.chain import chain, root
from actors.rules.keys import keys as key_array
from actors.rules.keys import owners
from bus import subjects
from bus.actor import Actor, Envelope, Handler
from bus.bus import Bus
from bus.subjects import CLAIM, SHORTENED, SUBMIT, TOKENS, TOUCHED, Address, Subject
from run.simulator import RecordingBroker, World
from run.virtual import run_virtual
from schemas.bulk import Handle
from schemas.cache import (
    BlocksFound,
    BlocksTouched,
    CachedPrefix,
    DescribeSpace,
    FindBlocks,
    HitShortened,
    Snapshot,
    SpaceDescribed,
)
from schemas.handover import Claim, Claimed, Dispatch, Dispatched, Refused
from schemas.message import Role
from schemas.request import (
    Cancel,
    CancelAcknowledged,
    Finished,
    FinishReason,
    Submit,
    Taken,
    TokensEmitted,
)
from schemas.routing import LoadReported

STOP = Finished(reason=FinishReason.STOP)
HANDLE = Handle(address="mem://x", key="k", generation=1, size_bytes=1, checksum=0)
NEVER_NS = 1 << 62


class Shard(Actor):
    """Knows what it is told. While it is `stuck` it hears, and answers nothing."""

    role = Role.METADATA

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.blocks: dict[bytes, int] = {}
        self.snapshots: dict[bytes, Snapshot] = {}
        self.num_asked = 0
        self.is_stuck = False

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {subjects.FIND: self._on_find}

    async def _on_find(self, find: FindBlocks, envelope: Envelope) -> BlocksFound | None:
        self.num_asked += 1
        if self.is_stuck:
            return None
        keys = [find.keys[i : i + 16] for i in range(0, len(find.keys), 16)]
        num = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        locations = np.array([self.blocks[key] for key in keys[:num]], dtype="<u8").tobytes()
        kept = [(i, self.snapshots[key]) for i, key in enumerate(keys[:num]) if key in self.snapshots]
        return BlocksFound(locations=locations, snapshots=kept)


class Replica(Actor):
    """Takes every prompt, and keeps what it was sent; or refuses all while it `is_full`."""

    role = Role.PREFILL

    def __init__(self, id: str, bus: Bus, space: str | None) -> None:
        super().__init__(id, bus)
        self.space = space
        self.is_full = False
        self.dispatches: list[Dispatch] = []

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {
            subjects.DESCRIBE: self._on_describe,
            subjects.DISPATCH: self._on_dispatch,
            subjects.CANCEL_PREFILL: self._on_cancel,
        }

    def load(self) -> LoadReported:
        reserved = [dispatch.reservation for dispatch in self.dispatches]
        return structs.replace(super().load(), capacity_requests=99, capacity_tokens=1 << 22, reservations=reserved)

    async def _on_describe(self, describe: DescribeSpace, envelope: Envelope) -> SpaceDescribed | None:
        return None if self.space is None else SpaceDescribed(space=self.space)

    async def _on_dispatch(self, dispatch: Dispatch, envelope: Envelope) -> Dispatched | Refused:
        if self.is_full:
            return Refused(reason="full")
        self.dispatches.append(dispatch)
        return Dispatched()

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        return CancelAcknowledged(request_id=cancel.request_id, was_running=True)


class Recipe(Actor):
    """Keeps what comes."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.emitted: list[TokensEmitted] = []
        self.touched: list[bytes] = []

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {subjects.RECIPE_TOKENS: self._on_tokens}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {TOUCHED.at(Role.ENTRYPOINT): self._on_touched}

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        self.emitted.append(emitted)
        return Taken()

    async def _on_touched(self, touched: BlocksTouched, envelope: Envelope) -> None:
        self.touched.append(touched.keys)


class Scene(World):
    """An entrypoint between scripted shards, a scripted replica and a recipe; the test is its decode replica."""

    recipe: Recipe
    replica: Replica

    @property
    def entrypoint(self) -> Entrypoint:
        entrypoint = self.actors["entrypoint/e0"]
        assert isinstance(entrypoint, Entrypoint)
        return entrypoint

    @property
    def shards(self) -> list[Shard]:
        return [actor for actor in self.actors.values() if isinstance(actor, Shard)]

    async def add_shard(self, id: str) -> Shard:
        shard = Shard(id, await self.bus(f"metadata/{id}"))
        await self.add(shard)
        return shard

    def keys(self, request: Submit) -> list[bytes]:
        tokens = np.frombuffer(request.prompt.inline, dtype="<u4")
        return chain(root("space", request.cache.encode()), tokens)

    def owner(self, key: bytes) -> Shard:
        ids = sorted(shard.id for shard in self.shards)
        shard = self.actors[f"metadata/{ids[owners(key_array(key), ids)[0]]}"]
        assert isinstance(shard, Shard)
        return shard

    def store(self, request: Submit, blocks: range, snapshots: tuple[int, ...] = ()) -> None:
        """Blocks of a prompt are there, and windows at the ends of some numbers of them."""
        keys = self.keys(request)
        for number in blocks:
            self.owner(keys[number]).blocks[keys[number]] = (number + 1) << 25
        for end in snapshots:
            key = keys[end - 1]
            kept = Snapshot(key=key, holder="prefill/p0", handle=HANDLE, expires_ns=NEVER_NS)
            self.owner(key).snapshots[key] = kept

    async def send(self, request: Submit) -> None:
        await self.recipe.bus.ask(SUBMIT.at("e0"), request, timeout_s=5)

    async def placed(self, request: Submit) -> Dispatch:
        """Submit, and wait until prefill has it."""
        await self.send(request)
        await until(lambda: any(d.request_id == request.request_id for d in self.replica.dispatches))
        return next(d for d in self.replica.dispatches if d.request_id == request.request_id)

    async def prefix(self, request: Submit) -> CachedPrefix:
        prefix = (await self.placed(request)).prefix
        assert prefix is not None
        return prefix

    async def shorten(self, dispatch: Dispatch, num_blocks: int, start: int, epoch: int | None = None) -> None:
        said = HitShortened(
            request_id=dispatch.request_id,
            epoch=dispatch.epoch if epoch is None else epoch,
            num_blocks=num_blocks,
            start=start,
            approximate=True,
            reason="test",
        )
        assert await self.recipe.bus.ask(SHORTENED.at("e0"), said, timeout_s=5) == Taken()

    async def claim(self, dispatch: Dispatch) -> int:
        claim = Claim(request_id=dispatch.request_id, from_epoch=dispatch.epoch, replica="d0")
        claimed = await self.recipe.bus.ask(CLAIM.at("e0"), claim, timeout_s=5)
        assert isinstance(claimed, Claimed)
        return claimed.epoch

    async def emit(self, request_id: str, epoch: int, tokens: list[int], end: Finished | None = None) -> TokensEmitted:
        """Tokens from index 0 on, as decode sends them; what the recipe gets."""
        emitted = TokensEmitted(
            source="decode/d0",
            request_ids=[request_id],
            epochs=[epoch],
            first_indexes=[0],
            counts=[len(tokens)],
            tokens=tokens,
            ends=[(0, end)] if end else [],
        )
        num_before = len(self.recipe.emitted)
        await self.recipe.bus.tell(TOKENS.at("e0"), emitted)
        await until(lambda: len(self.recipe.emitted) > num_before)
        return self.recipe.emitted[-1]


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if is_so():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to be")


@asynccontextmanager
async def scene(num_shards: int, space: str | None, broker: RecordingBroker | None) -> AsyncIterator[Scene]:
    world = Scene(0, broker)
    try:
        world.recipe = Recipe("rc0", await world.bus("recipe/rc0"))
        await world.add(world.recipe)
        await world.add_balancers()
        world.replica = Replica("p0", await world.bus("prefill/p0"), space)
        await world.add(world.replica)
        await world.add_entrypoint("e0")
        for number in range(num_shards):
            await world.add_shard(f"m{number}")
        await asyncio.sleep(0.01)
        yield world
    finally:
        await world.stop()


def played(
    play: Callable[[Scene], Awaitable[None]],
    num_shards: int = 2,
    space: str | None = "space",
    broker: RecordingBroker | None = None,
) -> None:
    """Run a test in a scene of its own."""

    async def main() -> None:
        async with scene(num_shards, space, broker) as world:
            await play(world)

    run_virtual(main())
