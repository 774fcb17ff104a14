"""The vision replica: what an image is, its embeddings, and every way an image can be bad."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from actors.vision import actor as vision_actor
from actors.vision import held, queue
from actors.vision.actor import Vision
from actors.vision.held import Held
from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, BusError
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import CANCEL_VISION, ENCODE_IMAGE, RELEASE_IMAGE, RESOLVE_IMAGE
from schemas.bulk import Handle, Payload
from schemas.failure import Code, Failure
from schemas.request import Cancel
from schemas.vision import EncodeImage, Image, ImageEncoded, ImageResolved, ReleaseImage, ResolveImage
from tests.actors.eyes import CONFIG, HIDDEN_SIZE, FakeEncoder, num_tokens
from tests.actors.pictures import picture
from tests.bus.conformance import ActorConformance
from tests.conftest import Run

TIMEOUT_S = 10.0


class TestVisionConformance(ActorConformance):
    """The contract of every actor."""

    def make(self, bus: Bus) -> Actor:
        return Vision("v0", bus, MemoryBulk(MemoryHub()), FakeEncoder(), CONFIG)


@dataclass
class Sight:
    """A vision replica and somebody who asks it."""

    vision: Vision
    encoder: FakeEncoder
    held: MemoryBulk
    bus: Bus
    bulk: MemoryBulk

    async def resolve(self, data: bytes) -> ImageResolved:
        wanted = ResolveImage(image=await self.bulk.wrap(data))
        return await self.bus.ask(RESOLVE_IMAGE.any(), wanted, timeout_s=TIMEOUT_S)

    async def encode(self, image: ImageResolved, request_id: str = "r1", **fields: Any) -> ImageEncoded:
        asked = EncodeImage(request_id=request_id, image=placed(image), **fields)
        return await self.bus.ask(ENCODE_IMAGE.any(), asked, timeout_s=TIMEOUT_S)

    async def rows(self, encoded: ImageEncoded) -> bytes:
        return await self.bulk.pull(encoded.embeddings, timeout_s=TIMEOUT_S)


def placed(image: ImageResolved) -> Image:
    fields = ("num_tokens", "digest", "width", "height", "vision", "pixels", "num_patches")
    return Image(start=3, **{name: getattr(image, name) for name in fields})


@asynccontextmanager
async def sight() -> AsyncIterator[Sight]:
    broker, hub = MemoryBroker(), MemoryHub()
    ours, theirs = Bus(MemoryWire(broker)), Bus(MemoryWire(broker))
    bulks = [MemoryBulk(hub), MemoryBulk(hub)]
    for bus, bulk in zip((ours, theirs), bulks, strict=True):
        await bus.open()
        await bulk.start()
    encoder = FakeEncoder()
    vision, ready = Vision("v0", theirs, bulks[1], encoder, CONFIG), asyncio.Event()
    running = asyncio.create_task(vision.run(ready.set))
    await ready.wait()
    try:
        yield Sight(vision, encoder, bulks[1], ours, bulks[0])
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert encoder.is_closed


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)


async def fails(asking: Any) -> Failure:
    with pytest.raises(BusError) as caught:
        await asking
    return caught.value.failure


def test_an_image_is_resolved_then_encoded_then_released(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            image = await system.resolve(picture("red", 100, 60))
            assert (image.width % 14, image.height % 14, image.vision) == (0, 0, "v0")
            assert image.num_tokens == num_tokens(image.width, image.height)
            assert image.pixels.size_bytes == 3 * image.width * image.height
            assert len(image.digest) == 32
            encoded = await system.encode(image)
            rows = await system.rows(encoded)
            assert len(rows) == 4 * HIDDEN_SIZE * image.num_tokens
            # Another replica could do it again: pixels and embeddings are there until they are released.
            assert await system.rows(await system.encode(image)) == rows == await system.rows(encoded)
            assert system.held.num_offers == 3
            for handle in (image.pixels, encoded.embeddings, encoded.embeddings):
                await system.bus.tell(RELEASE_IMAGE.at("v0"), ReleaseImage(held=handle))
            await until(lambda: system.held.num_offers == 1)

    run_async(main())


def test_the_digest_is_the_content_not_the_file(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            png, bmp = await system.resolve(picture("red")), await system.resolve(picture("red", format="WEBP"))
            same, other = await system.resolve(picture("red")), await system.resolve(picture("blue"))
            assert png.digest == same.digest != other.digest
            assert bmp.num_tokens == png.num_tokens
            large = await system.resolve(picture("red", 4000, 3000))  # by handle
            assert large.num_tokens <= CONFIG.max_image_tokens

    run_async(main())


BAD = {
    "empty": b"",
    "text": b"not an image",
    "truncated": picture("red", 300, 200)[:-40],
    "header only": picture("red")[:12],
    "bmp": picture("red", format="BMP"),
    "too thin": picture("red", 20_000, 1),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_bad_images_are_the_clients_fault_and_harm_nobody(run_async: Run, data: bytes) -> None:
    async def main() -> None:
        async with sight() as system:
            failure = await fails(system.resolve(data))
            assert failure.code is Code.BAD_REQUEST and "image" in failure.message
            assert (await system.resolve(picture())).num_tokens > 0

    run_async(main())


def test_our_own_faults_are_vision_errors_and_the_next_image_is_served(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with sight() as system:
            image = await system.resolve(picture())
            system.encoder.error = RuntimeError("out of memory")
            failure = await fails(system.encode(image))
            assert failure.code is Code.VISION_ERROR and "memory" not in failure.message
            assert await system.rows(await system.encode(image))
            assert (await fails(system.encode(replaced(image, num_tokens=31)))).code is Code.VISION_ERROR
            assert (await fails(system.encode(replaced(image, width=28)))).code is Code.BAD_REQUEST
            gone = Handle(address="mem://gone", key="0" * 32, generation=1, size_bytes=9, checksum=0)
            failure = await fails(system.encode(replaced(image, pixels=gone, digest="another")))
            assert failure.code is Code.VISION_ERROR and "mem:" not in failure.message
            wanted = ResolveImage(image=Payload(handle=gone))
            asking = system.bus.ask(RESOLVE_IMAGE.any(), wanted, timeout_s=TIMEOUT_S)
            assert (await fails(asking)).code is Code.VISION_ERROR
            monkeypatch.setattr(vision_actor, "prepare", lambda data, config: 1 / 0)
            assert (await fails(system.resolve(picture()))).code is Code.VISION_ERROR
            monkeypatch.undo()
            assert await system.rows(await system.encode(await system.resolve(picture())))
            assert len(system.vision._queue) == 0 and system.vision._num_resolving == 0

    run_async(main())


def replaced(image: ImageResolved, **fields: Any) -> ImageResolved:
    return ImageResolved(**{name: getattr(image, name) for name in image.__struct_fields__} | fields)


def test_images_are_encoded_in_order_and_a_cancelled_request_leaves(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            images = [await system.resolve(picture(color)) for color in ("red", "green", "blue", "white")]
            alone = [rows_of(image, await system.bulk.pull(image.pixels, timeout_s=TIMEOUT_S)) for image in images]
            system.encoder.gate.clear()
            asking = [
                asyncio.create_task(system.encode(image, request_id))
                for image, request_id in zip(images, ("a", "b", "c", "b"), strict=True)
            ]
            jobs = system.vision._queue
            await until(lambda: len(jobs) == 4 and all(job.pixels for job in jobs))
            report = system.vision.load()
            assert report.num_waiting == 4
            assert report.detail["num_patches"] == sum(image.width * image.height for image in images) // 14**2
            cancel = Cancel(request_id="b")
            assert (await system.bus.ask(CANCEL_VISION.any(), cancel, timeout_s=TIMEOUT_S)).was_running
            assert not (await system.bus.ask(CANCEL_VISION.any(), cancel, timeout_s=TIMEOUT_S)).was_running
            system.encoder.gate.set()
            answers = await asyncio.gather(*asking, return_exceptions=True)
            assert [isinstance(answer, BusError) for answer in answers] == [False, True, False, True]
            assert isinstance(answers[0], ImageEncoded) and isinstance(answers[2], ImageEncoded)
            assert [await system.rows(answers[0]), await system.rows(answers[2])] == [alone[0], alone[2]]
            assert len(system.encoder.encoded) == 2
            assert system.vision.load().detail["num_patches"] == 0

    run_async(main())


def rows_of(image: ImageResolved, pixels: bytes) -> bytes:
    """What the encoder makes of it, whoever asks."""
    return FakeEncoder()._rows(np.frombuffer(pixels, dtype=np.uint8).reshape(image.height, image.width, 3))


def test_a_cancel_while_it_is_encoded_is_answered_at_once(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            image = await system.resolve(picture())
            system.encoder.gate.clear()
            asking = asyncio.create_task(system.encode(image))
            await system.encoder.at_it.wait()
            await system.bus.ask(CANCEL_VISION.any(), Cancel(request_id="r1"), timeout_s=TIMEOUT_S)
            assert (await fails(asking)).code is Code.CANCELLED
            system.encoder.gate.set()
            assert await system.rows(await system.encode(image))
            assert system.held.num_offers == 2  # the pixels, and the embeddings of the second
            assert len(system.encoder.encoded) == 1  # what was begun for nobody is there for the next

    run_async(main())


def test_what_nobody_waits_for_is_not_encoded(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            image = await system.resolve(picture())
            failure = await fails(system.encode(image, deadline_ns=system.bus.seams.clock_ns() - 1))
            assert failure.code is Code.DEADLINE_EXCEEDED
            assert system.encoder.encoded == []
            late = ResolveImage(image=Payload(inline=picture()), deadline_ns=1)
            failure = await fails(system.bus.ask(RESOLVE_IMAGE.any(), late, timeout_s=TIMEOUT_S))
            assert failure.code is Code.DEADLINE_EXCEEDED

    run_async(main())


def test_a_full_queue_and_a_draining_replica_refuse(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with sight() as system:
            image = await system.resolve(picture())
            monkeypatch.setattr(queue, "MAX_QUEUED", 0)
            assert (await fails(system.encode(image))).code is Code.OVERLOADED
            monkeypatch.setattr(vision_actor, "MAX_RESOLVING", 0)
            assert (await fails(system.resolve(picture()))).code is Code.OVERLOADED
            await system.vision.drain()
            assert (await fails(system.resolve(picture()))).code is Code.SHUTTING_DOWN
            assert (await fails(system.encode(image))).code is Code.SHUTTING_DOWN

    run_async(main())


def test_what_is_held_for_others_is_bounded(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with sight() as system:
            image = await system.resolve(picture())
            monkeypatch.setattr(held, "MAX_HELD_BYTES", image.pixels.size_bytes + 10)
            assert (await fails(system.resolve(picture()))).code is Code.OVERLOADED
            assert (await fails(system.encode(image))).code is Code.OVERLOADED
            assert system.vision.load().detail["held_bytes"] == image.pixels.size_bytes
            await system.bus.tell(RELEASE_IMAGE.at("v0"), ReleaseImage(held=image.pixels))
            await until(lambda: system.held.num_offers == 0)
            assert system.vision.load().detail["held_bytes"] == 0
            await system.resolve(picture())

    run_async(main())


def test_what_has_expired_is_not_counted() -> None:
    room = Held()
    room.add("a", held.MAX_HELD_BYTES, until_s=5.0)
    assert not room.has_room(1, now_s=4.0)
    room.remove("b")
    assert room.has_room(1, now_s=5.0) and room.num_bytes == 0
