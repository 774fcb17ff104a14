"""Images at the doors: SDKs and NATS clients above a recipe, and a vision replica beside it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from actors.recipe.card import ModelCard
from actors.recipe.fetch import FETCH, Fetch
from actors.vision.actor import NUM_DECODING, Vision
from bus import images as bus_images
from bus.bulk import MemoryBulk
from bus.bus import Bus
from bus.memory import MemoryWire
from bus.subjects import EXITED
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.request import Submit
from tests.actors.bodies import CHAT, GENERATING, MESSAGES
from tests.actors.clients import sdks
from tests.actors.edge import IMAGE_TOKEN, Edge, Inbox, edge
from tests.actors.eyes import CONFIG, FakeEncoder
from tests.actors.pictures import block, body_of, picture
from tests.conftest import Run

RED, BLUE = picture("red"), picture("blue", 90, 60)


@dataclass
class Sight:
    """An edge that sees."""

    edge: Edge
    vision: Vision
    bulk: MemoryBulk
    bus: Bus

    @property
    def num_held(self) -> int:
        return self.bulk.num_offers

    async def submitted(self) -> Submit:
        return list(self.edge.entrypoint.submitted.values())[-1]

    async def until_free(self) -> None:
        async with asyncio.timeout(10):
            while self.num_held:
                await asyncio.sleep(0)


@asynccontextmanager
async def sight(card: ModelCard, fetch: Fetch = FETCH) -> AsyncIterator[Sight]:
    async with edge(card, fetch=fetch) as system, seeing(system) as one:
        yield one


@asynccontextmanager
async def seeing(system: Edge, id: str = "v0") -> AsyncIterator[Sight]:
    """A vision replica beside this edge."""
    bus, bulk = Bus(MemoryWire(system.broker)), MemoryBulk(system.hub)
    await bus.open()
    await bulk.start()
    vision, ready = Vision(id, bus, bulk, FakeEncoder(), CONFIG), asyncio.Event()
    running = asyncio.create_task(vision.run(ready.set))
    await ready.wait()
    try:
        yield Sight(system, vision, bulk, bus)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await bus.close()


async def chat(client: openai.AsyncOpenAI, *blocks: Any, **fields: Any) -> tuple[str, int]:
    """The answer and the tokens of the prompt."""
    body = body_of(CHAT, *blocks)
    answer = await client.chat.completions.create(**body, **fields)
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens if answer.usage else 0


def test_every_protocol_submits_images_and_counts_them(run_async: Run, sighted: ModelCard) -> None:
    async def main() -> None:
        async with sight(sighted) as system, sdks(system.edge) as (one, other):
            blocks = ("Look:", RED, "and", BLUE)
            plain = (await chat(one, "Look:", "and"))[1]
            text, used = await chat(one, *blocks)
            submits = [await system.submitted()]
            assert text == "Hello there!" and used > plain
            body = body_of(Protocol.RESPONSES, *blocks)
            used_by_responses = (await one.responses.create(**body)).usage
            submits.append(await system.submitted())
            body = body_of(MESSAGES, *blocks)
            counted = await other.messages.count_tokens(**body)
            message = await other.messages.create(**body, max_tokens=50)
            submits.append(await system.submitted())
            assert counted.input_tokens == message.usage.input_tokens == used
            assert used_by_responses is not None and used_by_responses.input_tokens == used
            for submit in submits:
                await check(system, submit)
                assert submit.prompt == submits[0].prompt
            assert system.num_held == 6  # of three requests that an entrypoint now owns

    run_async(main())


async def check(system: Sight, submit: Submit) -> None:
    ids = np.frombuffer(submit.prompt.inline, dtype="<u4")
    assert len(submit.images) == 2
    positions = [i for image in submit.images for i in range(image.start, image.start + image.num_tokens)]
    assert list(np.flatnonzero(ids == IMAGE_TOKEN)) == positions
    assert submit.images[0].digest != submit.images[1].digest
    for image, color in zip(submit.images, ((255, 0, 0), (0, 0, 255)), strict=True):
        pixels = await system.edge.recipe._bulk.pull(image.pixels, timeout_s=5)
        middle = np.frombuffer(pixels, dtype=np.uint8).reshape(image.height, image.width, 3)[image.height // 2]
        assert tuple(middle[image.width // 2]) == color


def test_streams_and_nats_clients_see_as_well(run_async: Run, sighted: ModelCard) -> None:
    async def main() -> None:
        async with sight(sighted) as system, sdks(system.edge) as (one, _):
            stream = await one.chat.completions.create(**body_of(CHAT, RED, "x"), stream=True)
            text = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert "".join(filter(None, text)) == "Hello there!"
            client = await system.edge.client()
            for protocol in GENERATING:
                await client.send(protocol, body_of(protocol, "x", RED))
                [answer] = await client.all()
                assert "error" not in answer or answer["error"] is None
                assert len((await system.submitted()).images) == 1
            await client.send(Protocol.COUNT_TOKENS, body_of(MESSAGES, "x", RED))
            [answer] = await client.all()
            assert answer["input_tokens"] == (await system.submitted()).num_prompt_tokens

    run_async(main())


def test_large_images_travel_beside_the_bus(run_async: Run, sighted: ModelCard) -> None:
    async def main() -> None:
        async with sight(sighted) as system, sdks(system.edge) as (one, _):
            large = noise(700, 500)
            assert len(large) > 500_000
            assert (await chat(one, large, large))[0] == "Hello there!"
            assert system.edge.recipe._bulk.num_offers == 0

    run_async(main())


def noise(width: int, height: int) -> bytes:
    """A PNG that does not compress."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), os.urandom(3 * width * height)).save(file, "PNG")
    return file.getvalue()


BAD: dict[str, Callable[[Protocol], dict[str, Any]]] = {
    "no image": lambda protocol: block(protocol, b"hello"),
    "cut short": lambda protocol: block(protocol, picture("red", 200, 100)[:-30]),
    "of another type": lambda protocol: block(protocol, picture(format="GIF")),
    "too thin": lambda protocol: block(protocol, picture("red", 20_000, 1)),
}


def test_bad_images_are_a_400_that_names_the_field(run_async: Run, sighted: ModelCard) -> None:
    async def main() -> None:
        async with sight(sighted) as system, sdks(system.edge) as (one, other):
            for bad in BAD.values():
                with pytest.raises(openai.BadRequestError) as caught:
                    await chat(one, "x", RED, bad(CHAT))
                assert caught.value.param == "messages[0].content[2].image_url"
                assert caught.value.code == "bad_request"
                with pytest.raises(openai.BadRequestError) as caught:
                    await one.responses.create(**body_of(Protocol.RESPONSES, "x", bad(Protocol.RESPONSES)))
                assert caught.value.param == "input[0].content[1].image_url"
                body = body_of(MESSAGES, RED, "x", bad(MESSAGES))
                for asking in (other.messages.create(**body, max_tokens=5), other.messages.count_tokens(**body)):
                    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[2\]\.source"):
                        await asking
            await system.until_free()  # of the good ones, too, nothing is held
            assert len(system.edge.recipe._open) == 0 and system.edge.recipe._intake.num_calls == 0

    run_async(main())


def test_what_is_refused_later_is_let_go(run_async: Run, sighted: ModelCard) -> None:
    async def main() -> None:
        async with sight(sighted) as system, sdks(system.edge) as (one, other):
            system.edge.entrypoint.refusal = Failure(code=Code.OVERLOADED, message="full")
            with pytest.raises(openai.InternalServerError):
                await chat(one, RED)
            with pytest.raises(openai.BadRequestError, match="context length"):
                await chat(one, RED, "x", max_tokens=2040)
            await other.messages.count_tokens(**body_of(MESSAGES, RED))
            await system.until_free()

    run_async(main())


async def cancelled_unseen(system: Sight) -> tuple[Inbox, Inbox]:
    """A request that is cancelled while vision has no time for its image: its client, and who cancelled it."""
    for _ in range(NUM_DECODING):
        await system.vision._decoding.acquire()
    client, other = await system.edge.client(), await system.edge.client()
    await client.send(CHAT, body_of(CHAT, RED))
    async with asyncio.timeout(10):
        while system.vision.load().num_running == 0:
            await asyncio.sleep(0)
    [request] = system.edge.recipe._open
    await other.send(Protocol.CANCEL, {"id": request.id})
    return client, other


def test_a_cancel_while_nobody_has_looked_yet(run_async: Run, sighted: ModelCard) -> None:
    async def main() -> None:
        async with sight(sighted) as system:
            client, other = await cancelled_unseen(system)
            assert (await other.all())[0]["cancelled"]
            for _ in range(NUM_DECODING):
                system.vision._decoding.release()
            [answer] = await client.all()
            assert answer["error"]["code"] == "cancelled"
            await system.until_free()
            assert system.edge.entrypoint.submitted == {}

    run_async(main())


def test_after_a_cancel_nobody_is_asked_again(
    run_async: Run, sighted: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_images, "TRY_S", 0.2)

    async def main() -> None:
        async with sight(sighted) as system:
            client, _ = await cancelled_unseen(system)
            [answer] = await client.all()
            assert answer["error"]["code"] == "cancelled"
            assert system.vision.load().num_running == 1

    run_async(main())


def test_a_replica_killed_while_it_looks_is_replaced_at_once(run_async: Run, sighted: ModelCard) -> None:
    async def main() -> None:
        async with sight(sighted) as system:
            for _ in range(NUM_DECODING):
                await system.vision._decoding.acquire()
            client = await system.edge.client()
            await client.send(CHAT, body_of(CHAT, RED))
            async with asyncio.timeout(10):
                while system.vision.load().num_running == 0:
                    await asyncio.sleep(0)
            assert isinstance(system.bus.wire, MemoryWire)
            system.bus.wire.cut()
            system.bulk.cut()
            async with seeing(system.edge, "v1") as other:
                exited = ProcessExited(name="eyes", pid=1, members=["vision/v0"])
                await other.bus.tell(EXITED.all(), exited)
                [answer] = await client.all()
                assert answer["choices"][0]["message"]["content"] == "Hello there!"

    run_async(main())


def test_without_a_vision_replica_the_answer_is_typed(
    run_async: Run, sighted: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_images, "PATIENCE_S", 0.2)

    async def main() -> None:
        async with edge(sighted) as system, sdks(system) as (one, other):
            with pytest.raises(openai.InternalServerError) as caught:
                await chat(one, RED)
            assert (caught.value.status_code, caught.value.code) == (503, "no_replica")
            with pytest.raises(anthropic.InternalServerError, match="vision"):
                await other.messages.count_tokens(**body_of(MESSAGES, RED))
            monkeypatch.setattr(bus_images, "PATIENCE_S", 60.0)
            client = await system.client()
            deadline = {"Shoal-Deadline-Ns": str(system.recipe.bus.seams.clock_ns() + 10**8)}
            await client.send(CHAT, body_of(CHAT, RED), deadline)
            [answer] = await client.all()
            assert answer["error"]["code"] == "deadline_exceeded"
            assert (await chat(one, "text goes on"))[0] == "Hello there!"

    run_async(main())
