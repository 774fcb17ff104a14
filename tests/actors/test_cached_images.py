"""Images in prompts of which something is cached, in a whole system: what is restored needs no vision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from actors.entrypoint.lookup import name
from actors.rules.slab import HEADER_BYTES, Slab, SlotError, read_slot
from bus.subjects import EXITED
from kernels.config import ModelConfig
from kernels.encoder import LocalEncoder
from run.settings import DEFAULT_MODEL
from run.virtual import run_virtual
from schemas.liveness import ProcessExited
from schemas.request import Submit
from tests.actors.cached import Cached, cached
from tests.actors.core import quiet
from tests.actors.looking import Encodes, Part, about, add_vision
from tests.actors.pictures import picture
from tests.actors.test_cache_local import SEEDED, Real

RED, BLUE = picture("red", 120, 90), picture("blue", 120, 90)
NUM_RED = 14


class Gallery:
    """A cached system that sees, and counts what it encodes."""

    def __init__(self, system: Cached, encodes: Encodes) -> None:
        self.system = system
        self.encodes = encodes

    async def run(self, request_id: str, *parts: Part, **fields: Any) -> list[int]:
        return await self.system.run(await about(self.system.listener.bus, request_id, *parts, **fields))

    async def cold(self, *parts: Part) -> list[int]:
        """What a cache without any of it has to do with; in it nothing is counted."""
        num_before = self.encodes.num
        tokens = await self.run("cold", *parts, cache="of another")
        assert self.system.listener.cached.get("cold", 0) == 0 and self.encodes.num > num_before
        self.encodes.num = num_before
        return tokens

    async def first_turn(self, *parts: Part) -> list[Part]:
        """The parts of the turn that follows, up to the answer; all that is known is stored."""
        answer = await self.run("first", *parts)
        await self.system.settle()
        assert self.encodes.num == sum(isinstance(part, bytes) for part in parts)
        self.encodes.num = 0
        return [*parts, answer]

    def damage(self, request: Submit, block: int) -> int:
        """Flip a bit of a block of this prompt, wherever it is written; in how many places that is."""
        num, key = 0, name("timed", request, request.prompt.inline).key(block)
        for data in self.system.folder.files.values():
            slab = Slab.unpack(data[:HEADER_BYTES])
            for begin in map(slab.offset, range(slab.num_slots)):
                try:
                    read_slot(data[begin : begin + slab.slot_bytes], slab, key)
                except SlotError:
                    continue
                data[begin + slab.slot_bytes - 1] ^= 1
                num += 1
        return num

    def forget_windows(self) -> None:
        """Nobody has windows any more, though everybody counts on them."""
        for keeper in self.system.keepers():
            keeper.snapshots.clear()


def gallery(play: Callable[[Gallery], Awaitable[None]]) -> None:
    """Run a test in one; nothing may be held in the end."""

    async def main() -> None:
        encodes = Encodes()
        async with cached(broker=encodes) as system:
            await add_vision(system)
            await play(Gallery(system, encodes))
            assert await quiet(system) == {}

    run_virtual(main())


def test_a_second_turn_needs_no_vision_for_what_the_first_has_seen() -> None:
    async def play(it: Gallery) -> None:
        turn = [*await it.first_turn(100, RED, 300), 200]
        want = await it.cold(*turn)
        assert await it.run("hit", *turn) == want
        assert it.encodes.num == 0 and it.system.listener.cached["hit"] == 384
        request = await about(it.system.listener.bus, "blind", *turn)
        it.system.kill("vision/v0")
        await it.system.listener.bus.tell(EXITED.all(), ProcessExited(name="v", pid=1, members=["vision/v0"]))
        assert await it.system.run(request) == want

    gallery(play)


@pytest.mark.parametrize("num_before", [384 - 14, 384 - 13, 384 - 7, 384])
def test_an_image_is_encoded_if_any_of_it_is_computed(num_before: int) -> None:
    """The hit ends with it, or within it, or before it."""

    async def play(it: Gallery) -> None:
        turn = [*await it.first_turn(num_before, RED, 100), 200]
        want = await it.cold(*turn)
        assert await it.run("hit", *turn) == want
        assert it.system.listener.cached["hit"] == 384
        assert it.encodes.num == (num_before + NUM_RED > 384)

    gallery(play)


@pytest.mark.parametrize(
    ("damaged", "num_returns", "num_cached"),
    [(3, 0, 384), (2, 1, 128), (None, 1, 384)],
    ids=["behind the images", "of one", "windows"],
)
def test_an_image_that_is_not_restored_after_all_is_encoded(
    damaged: int | None, num_returns: int, num_cached: int
) -> None:
    """Prefill finds out, and returns the request, when it lacks an image for what it has to compute now."""

    async def play(it: Gallery) -> None:
        parts: list[Part] = [20, RED, 250, RED, 300] if damaged else [20, RED, 370, RED, 200]
        turn = [*await it.first_turn(*parts), 200]
        want = await it.cold(*turn)
        request = await about(it.system.listener.bus, "hit", *turn)
        if damaged:
            assert it.damage(request, damaged) == 1
        else:
            it.forget_windows()
        num_computed = it.system.total("computed_tokens")
        assert await it.system.run(request) == want
        known = it.system.entrypoint.shard.get("hit")
        assert known is not None and (known.num_returns, it.encodes.num) == (num_returns, 2 * num_returns)
        assert it.system.listener.cached["hit"] == num_cached
        assert it.system.total("computed_tokens") - num_computed == request.num_prompt_tokens - num_cached

    gallery(play)


def test_a_return_that_is_lost_is_said_again_and_the_request_is_not_given_up_meanwhile() -> None:
    async def play(it: Gallery) -> None:
        turn = [*await it.first_turn(20, RED, 370, RED, 200), 200]
        want = await it.cold(*turn)
        it.forget_windows()
        it.encodes.num_to_lose = 2
        assert await it.run("hit", *turn) == want
        assert (it.encodes.num_to_lose, it.encodes.num) == (0, 2)

    gallery(play)


def test_engines_that_compute_give_the_tokens_of_a_cold_run(tmp_path: Path) -> None:
    """One image is wholly restored, one lies across the end of what is, one behind it."""
    config = ModelConfig.from_folder(DEFAULT_MODEL)
    assert config.vision is not None and config.image_token_id is not None
    vision, fields = config.vision, {"image_token": config.image_token_id, "max_tokens": 16}

    async def main() -> None:
        system = Real(tmp_path)
        try:
            await system.setup()
            await add_vision(system, LocalEncoder(DEFAULT_MODEL), vision)
            bus = system.listener.bus
            num_tokens = (await about(bus, "probe", BLUE)).num_prompt_tokens
            common: list[Part] = [40, RED, 384 - 40 - num_tokens - num_tokens // 2, BLUE, 60]
            first = await about(bus, "first", *common, **fields)
            answer = await system.run(first)
            system.num_expected = (first.num_prompt_tokens + 15) // 128
            await system.settle()
            parts: list[Part] = [*common, answer, 60, RED, 50]
            hit = await about(bus, "hit", *parts, sampling=SEEDED, **fields)
            got = await system.run(hit)
            end = system.listener.cached["hit"]
            spans = [(image.start - end, image.start + image.num_tokens - end) for image in hit.images]
            assert [start < 0 for start, _ in spans] == [True, True, False] and spans[0][1] <= 0 < spans[1][1]
            cold = await about(bus, "cold", *parts, sampling=SEEDED, cache="other", **fields)
            assert await system.run(cold) == got
            assert system.total("replayed_tokens") == 0
        finally:
            await system.stop()

    asyncio.run(main())
