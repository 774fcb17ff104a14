"""A request that prefill returns, as it lacks an image: placed anew with all of them, once, and by one only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from msgspec import structs

from actors.entrypoint.finder import FRESH_S
from actors.rules.chain import Span, chain, root
from actors.vision.actor import Vision
from bus.subjects import CANCEL, SHORTENED, TOKENS
from schemas.cache import HitShortened
from schemas.failure import Code
from schemas.handover import Dispatch
from schemas.request import Cancel, Cancelled, Failed, Finished, FinishReason, Submit, Taken, TokensEmitted
from tests.actors.looking import Encodes, about, add_vision
from tests.actors.pictures import picture
from tests.actors.scripted import Scene, played, until

LENGTH = Finished(reason=FinishReason.LENGTH)
RED, BLUE = picture("red", 120, 90), picture("blue", 120, 90)


class Sights:
    """A scene with a vision replica, and a prompt whose first image is cached, its second is not."""

    def __init__(self, world: Scene, encodes: Encodes) -> None:
        self.world = world
        self.encodes = encodes

    @property
    def dispatches(self) -> list[Dispatch]:
        return self.world.replica.dispatches

    @property
    def vision(self) -> Vision:
        vision = self.world.actors["vision/v0"]
        assert isinstance(vision, Vision)
        return vision

    def num_held(self) -> int:
        """Pixels and embeddings on offer."""
        return self.world.bulks["vision/v0"].num_offers

    async def ask(self, request_id: str = "r1") -> Submit:
        """Of 5 blocks and a bit; the first of its images is within block 1, the second within block 3."""
        request = await about(self.world.recipe.bus, request_id, 140, RED, 230, BLUE, 300)
        spans = [Span(one.start, one.num_tokens, bytes.fromhex(one.digest)) for one in request.images]
        assert [span.start // 128 for span in spans] == [1, 3] == [(s.start + s.num_tokens) // 128 for s in spans]
        self.store(request, 3)
        return request

    def store(self, request: Submit, num_cached: int) -> None:
        """So many blocks are cached, and no others."""
        spans = [Span(one.start, one.num_tokens, bytes.fromhex(one.digest)) for one in request.images]
        keys = chain(root("space"), np.frombuffer(request.prompt.inline, dtype="<u4"), spans)
        for number, key in enumerate(keys):
            blocks = self.world.owner(key).blocks
            blocks.pop(key, None)
            if number < num_cached:
                blocks[key] = (number + 1) << 25

    async def give_back(self, dispatch: Dispatch) -> None:
        said = HitShortened(
            request_id=dispatch.request_id,
            epoch=dispatch.epoch,
            num_blocks=0,
            start=0,
            approximate=False,
            reason="test",
            is_returned=True,
        )
        assert await self.world.recipe.bus.ask(SHORTENED.at("e0"), said, timeout_s=5) == Taken()

    async def dispatched(self, num: int = 1) -> Dispatch:
        await until(lambda: len(self.dispatches) >= num)
        await asyncio.sleep(0.01)  # it has been answered
        assert len(self.dispatches) == num
        return self.dispatches[-1]

    def ends(self) -> list[object]:
        return [end for emitted in self.world.recipe.emitted for _, end in emitted.ends]


def seen(play: Callable[[Sights], Awaitable[None]]) -> None:
    """Run a test in a scene; nothing may be held in the end."""
    encodes = Encodes()

    async def main(world: Scene) -> None:
        await add_vision(world)
        sights = Sights(world, encodes)
        num_tasks = len(world.entrypoint._tasks)
        await play(sights)
        await asyncio.sleep(1.0)
        assert sights.num_held() == 0 and len(world.entrypoint._tasks) == num_tasks
        assert sights.vision.load().reservations == []

    played(main, broker=encodes)


def test_what_is_cached_is_not_encoded_and_its_pixels_are_held_until_decode_has_it() -> None:
    async def play(sights: Sights) -> None:
        request = await sights.ask()
        await sights.world.send(request)
        first, second = request.images
        dispatch = await sights.dispatched()
        assert dispatch.prefix is not None and dispatch.tenant == "public"
        assert dispatch.prefix.images_from == first.start + first.num_tokens <= 256
        assert [image.start for image in dispatch.images] == [second.start] and sights.encodes.num == 1
        assert sights.num_held() == 2  # the pixels of both
        await sights.world.claim(dispatch)
        await until(lambda: sights.num_held() == 0)
        await _end(sights, "r1")

    seen(play)


def test_a_returned_request_is_given_all_its_images_once() -> None:
    async def play(sights: Sights) -> None:
        await sights.world.send(await sights.ask())
        returned = await sights.dispatched()
        await asyncio.gather(*(sights.give_back(returned) for _ in range(3)))
        again = await sights.dispatched(2)
        assert again.epoch > returned.epoch and len(again.images) == 2 and sights.encodes.num == 3
        assert again.prefix is not None and (again.prefix.num_blocks, again.prefix.images_from) == (3, 0)
        await sights.give_back(returned)  # told once more, much later
        await asyncio.sleep(1.0)
        assert len(sights.dispatches) == 2 and sights.num_held() == 2  # prefill may be lost with what it was given
        await sights.world.claim(again)
        await until(lambda: sights.num_held() == 0)
        await _end(sights, "r1")

    seen(play)


def test_a_return_that_overtakes_the_answer_to_its_dispatch_is_placed_by_one() -> None:
    async def play(sights: Sights) -> None:
        wire, held = sights.world.wires["prefill/p0"], list[Callable[[], Awaitable[None]]]()
        publish = wire.publish

        async def late(subject: str, body: bytes, **rest: Any) -> None:
            if sights.dispatches and not held:
                held.append(lambda: publish(subject, body, **rest))
            else:
                await publish(subject, body, **rest)

        wire.publish = late  # type: ignore[method-assign]
        await sights.world.send(await sights.ask())
        await until(lambda: bool(held))
        await sights.give_back(sights.dispatches[0])
        await asyncio.sleep(0.1)
        assert len(sights.dispatches) == 1
        await held[0]()
        again = await sights.dispatched(2)
        assert len(again.images) == 2
        await sights.world.claim(again)
        await _end(sights, "r1")

    seen(play)


def test_one_that_is_returned_with_all_its_images_ends_typed() -> None:
    async def play(sights: Sights) -> None:
        await sights.world.send(await sights.ask())
        for num in (1, 2):
            await sights.give_back(await sights.dispatched(num))
        await until(lambda: bool(sights.ends()))
        (end,) = sights.ends()
        assert isinstance(end, Failed) and end.failure.code is Code.INTERNAL
        assert len(sights.dispatches) == 2

    seen(play)


def test_one_that_ends_when_it_is_returned_or_encoded_again_is_over() -> None:
    async def play(sights: Sights) -> None:
        bus, encoder = sights.world.recipe.bus, sights.vision._encoder
        await sights.world.send(await sights.ask())
        await sights.give_back(await sights.dispatched())
        assert (await bus.ask(CANCEL.at("e0"), Cancel(request_id="r1"), timeout_s=5)).was_running
        await asyncio.sleep(1.0)
        await sights.world.send(await sights.ask("r2"))
        dispatch = await sights.dispatched(2)
        encoder.gate.clear()  # type: ignore[attr-defined]
        await sights.give_back(dispatch)
        await asyncio.sleep(1.0)
        assert (await bus.ask(CANCEL.at("e0"), Cancel(request_id="r2"), timeout_s=5)).was_running
        await sights.give_back(dispatch)
        encoder.gate.set()  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
        assert sights.ends() == [Cancelled(), Cancelled()] and len(sights.dispatches) == 2

    seen(play)


def test_a_start_that_moves_while_it_waits_has_what_is_new_encoded() -> None:
    async def play(sights: Sights) -> None:
        sights.world.replica.is_full = True
        request = await sights.ask()
        await sights.world.send(request)
        await asyncio.sleep(1.0)
        assert sights.encodes.num == 1
        sights.store(request, 0)
        await asyncio.sleep(FRESH_S)
        sights.world.replica.is_full = False
        dispatch = await sights.dispatched()
        assert len(dispatch.images) == 2 and sights.encodes.num == 2
        assert dispatch.prefix is not None and dispatch.prefix.images_from == 0
        await sights.world.claim(dispatch)
        await _end(sights, "r1")

    seen(play)


def test_exact_requests_have_all_encoded() -> None:
    async def play(sights: Sights) -> None:
        await sights.world.send(structs.replace(await sights.ask(), exact=True))
        dispatch = await sights.dispatched()
        assert len(dispatch.images) == 2 and dispatch.exact
        await sights.world.claim(dispatch)
        await until(lambda: sights.num_held() == 0)
        await _end(sights, "r1")

    seen(play)


async def _end(sights: Sights, request_id: str) -> None:
    """Decode has come to the end of it."""
    request = sights.world.entrypoint.shard.get(request_id)
    assert request is not None
    emitted = TokensEmitted(
        source="decode/d0",
        request_ids=[request_id],
        epochs=[request.epoch],
        first_indexes=[0],
        counts=[1],
        tokens=[7],
        ends=[(0, LENGTH)],
    )
    await sights.world.recipe.bus.tell(TOKENS.at("e0"), emitted)
    await until(lambda: LENGTH in sights.ends())
