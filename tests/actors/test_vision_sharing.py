"""Images that several requests have, images that never come, and more images than can be encoded."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from actors.vision import queue
from actors.vision.actor import LEASE_S, MAX_FAULTS, NUM_DECODING, Vision
from bus.bus import decoder, fail
from bus.images import PATIENCE_S
from bus.subjects import CANCEL_VISION, RELEASE_IMAGE, RELEASE_VISION, RESOLVE_IMAGE
from kernels.encoder import LocalEncoder
from kernels.engine import Pixels
from kernels.timed import StepCost
from run.settings import DEFAULT_MODEL
from run.virtual import run_virtual
from schemas.bulk import Handle, Payload
from schemas.failure import Code
from schemas.request import Cancel, End, Failed, Finished, FinishReason
from schemas.routing import Release
from schemas.vision import ReleaseImage, ResolveImage
from tests.actors.builders import submit
from tests.actors.core import quiet
from tests.actors.pictures import picture
from tests.actors.sight import sighted
from tests.actors.test_vision import TIMEOUT_S, Sight, fails, replaced, sight, until
from tests.conftest import Run

GONE = Handle(address="mem://gone", key="0" * 32, generation=1, size_bytes=9, checksum=0)
LENGTH = Finished(reason=FinishReason.LENGTH)


async def released(system: Sight) -> Counter[int]:
    """Counts the reservations that are released at the balancer vb, from now on."""
    seen: Counter[int] = Counter()
    name = RELEASE_VISION.at("vb").name
    await system.bus.wire.subscribe(name, lambda d: seen.update([decoder(Release).decode(d.body).reservation]))
    return seen


def test_requests_with_the_same_image_share_one_encoding_whoever_of_them_leaves(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            seen, vision = await released(system), system.vision
            image = await system.resolve(picture())
            system.encoder.gate.clear()
            asking = [
                asyncio.create_task(system.encode(image, id, reservation=i, balancer="vb"))
                for i, id in enumerate("abc", 1)
            ]
            await until(lambda: len(vision._queue) == 3 and system.encoder.at_it.is_set())
            report = vision.load()
            assert report.reservations == [1, 2, 3] and report.detail["num_patches"] == image.num_patches > 0
            await system.bus.ask(CANCEL_VISION.any(), Cancel(request_id="a"), timeout_s=TIMEOUT_S)
            assert (await fails(asking[0])).code is Code.CANCELLED
            system.encoder.gate.set()
            encoded = [await one for one in asking[1:]]
            later = await system.encode(replaced(image, pixels=GONE), "d", reservation=4, balancer="vb")
            assert len(system.encoder.encoded) == 1  # and of what is remembered no pixels are pulled
            rows = [await system.rows(one) for one in (*encoded, later)]
            assert rows[0] and rows == rows[:1] * 3
            await system.bus.tell(RELEASE_IMAGE.at("v0"), ReleaseImage(held=encoded[0].embeddings))
            await until(lambda: system.held.num_offers == 3)  # the pixels, and those of the others
            assert await system.rows(encoded[1]) == rows[0]
            await until(lambda: seen.total() == 4)
            assert seen == Counter([1, 2, 3, 4]) and vision.load().reservations == []

    run_async(main())


def test_pixels_come_from_whichever_request_still_has_them(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            seen = await released(system)
            image, other = await system.resolve(picture("red")), await system.resolve(picture("blue"))
            lost, gate, pull = replaced(image, pixels=GONE), asyncio.Event(), system.held.pull

            async def late(handle: Handle, *, timeout_s: float) -> bytes:
                if handle == GONE:
                    await gate.wait()
                return await pull(handle, timeout_s=timeout_s)

            system.held.pull = late  # type: ignore[method-assign]
            first = asyncio.create_task(system.encode(lost, "a", reservation=1, balancer="vb"))
            second = asyncio.create_task(system.encode(image, "b", reservation=2, balancer="vb"))
            await until(lambda: len(system.vision._queue) == 2)
            assert await system.rows(await system.encode(other, "c"))  # what never comes holds up no other
            gate.set()
            assert await system.rows(await first) == await system.rows(await second)
            gone = [asyncio.create_task(system.encode(replaced(lost, digest="x"), id)) for id in "de"]
            assert [(await fails(one)).code for one in gone] == [Code.VISION_ERROR] * 2
            await until(lambda: seen == Counter([1, 2]))
            assert len(system.vision._queue) == 0

    run_async(main())


def test_files_that_never_come_hold_up_no_other(run_async: Run) -> None:
    async def main() -> None:
        async with sight() as system:
            gate, pull = asyncio.Event(), system.held.pull

            async def never(handle: Handle, *, timeout_s: float) -> bytes:
                if handle == GONE:
                    await gate.wait()
                return await pull(handle, timeout_s=timeout_s)

            system.held.pull = never  # type: ignore[method-assign]
            wanted = ResolveImage(image=Payload(handle=GONE))
            asking = [
                asyncio.create_task(system.bus.ask(RESOLVE_IMAGE.any(), wanted, timeout_s=TIMEOUT_S))
                for _ in range(NUM_DECODING + 1)
            ]
            await until(lambda: system.vision.load().num_running == NUM_DECODING + 1)
            assert (await system.resolve(picture())).num_tokens > 0
            gate.set()
            assert [(await fails(one)).code for one in asking] == [Code.VISION_ERROR] * len(asking)

    run_async(main())


def test_what_is_remembered_is_what_the_tower_gives_again_to_the_bit(run_async: Run) -> None:
    """So `exact` asks nothing more of images: two encoders, with other images between, agree bitwise."""
    rng = np.random.default_rng(3)
    images: list[Pixels] = [rng.integers(0, 256, (42 * n, 84, 3), dtype=np.uint8) for n in (1, 2, 3)]

    async def main() -> None:
        one, other = LocalEncoder(DEFAULT_MODEL), LocalEncoder(DEFAULT_MODEL, num_threads=2)
        try:
            await one.start()
            await other.start()
            first, *_ = await one.encode(images)
            again = (await one.encode(images[::-1]))[-1]
            assert first == again == (await other.encode(images[:1]))[0]
        finally:
            await one.close()
            await other.close()

    run_async(main())


def test_an_encoder_that_fails_at_everything_ends_its_actor_and_images_go_to_others() -> None:
    async def main() -> None:
        async with sighted(2) as eyes:
            broken, sound = eyes.encoders.values()

            async def fails(images: Any) -> list[bytes]:
                raise RuntimeError("the device is gone")

            broken.encode = fails  # type: ignore[method-assign]
            files = [picture("red", 40 + i, 50) for i in range(9)]
            submits = [await eyes.submit(file, request_id=f"r{i}") for i, file in enumerate(files)]
            ends = [end for _, end in [await eyes.core.finish(wanted) for wanted in submits]]
            assert len([end for end in ends if isinstance(end, Failed)]) == MAX_FAULTS - 1
            assert ends[MAX_FAULTS - 1 :] == [LENGTH] * (len(ends) - MAX_FAULTS + 1)
            assert len(sound.encoded) == len(ends) - MAX_FAULTS + 1
            assert isinstance(eyes.core.tasks["vision/v0"].exception(), RuntimeError)

    run_virtual(main())


# Case 29: more images than can be encoded


TEXTS = [f"t{i}" for i in range(8)]
NUM_SEEING = 24
ENCODE_S = 3.0


async def overloaded(num_seeing: int) -> tuple[dict[str, End], dict[str, float], dict[str, int], int]:
    """The ends, when those of text came, what is held when all is over, and how many refusals there were."""
    async with sighted(2, cost=StepCost(step_ns=5_000_000)) as eyes:
        for encoder in eyes.encoders.values():
            encoder.encode = slowly(encoder.encode)  # type: ignore[method-assign]
        submits = [await eyes.submit(picture("red", 40 + i, 50), request_id=f"r{i}") for i in range(num_seeing)]
        if submits:
            lose_pixels(eyes.core.bulks.values(), submits[0].images[0].pixels)
        loop, ends_s = asyncio.get_running_loop(), dict[str, float]()

        async def finish(request: Any) -> None:
            await eyes.core.finish(request)
            ends_s[request.request_id] = loop.time()

        await asyncio.gather(*map(finish, [*submits, *(submit(id, num_tokens=40) for id in TEXTS)]))
        ends = dict(eyes.core.listener.ends)
        num_refused = sum(isinstance(end, Failed) for end in ends.values())
        held = await quiet(eyes.core, 2 * LEASE_S)
        assert all(not v.load().reservations for v in eyes.core.actors.values() if isinstance(v, Vision))
        return ends, {id: ends_s[id] for id in TEXTS}, held, num_refused


def slowly(encode: Any) -> Any:
    async def encoded(images: Any) -> list[bytes]:
        await asyncio.sleep(ENCODE_S)
        return list(await encode(images))

    return encoded


def lose_pixels(bulks: Any, lost: Handle) -> None:
    """These never come."""
    for bulk in bulks:

        async def pull(handle: Handle, *, timeout_s: float, pull: Any = bulk.pull) -> bytes:
            if handle == lost:
                await asyncio.sleep(timeout_s)
                raise fail(Code.TRANSFER_FAILED, "nothing came")
            return bytes(await pull(handle, timeout_s=timeout_s))

        bulk.pull = pull


def test_every_image_request_that_vision_cannot_take_ends_once_and_text_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "MAX_QUEUED", 2)
    _, alone_s, _, _ = run_virtual(overloaded(0))
    ends, texts_s, held, num_refused = run_virtual(overloaded(NUM_SEEING))
    assert len(ends) == NUM_SEEING + len(TEXTS) and held == {}
    codes = Counter(end.failure.code if isinstance(end, Failed) else None for end in ends.values())
    assert all(isinstance(end, Failed) or end == LENGTH for end in ends.values())
    assert codes[Code.VISION_ERROR] == 1 and isinstance(ends["r0"], Failed)  # whose pixels never came
    assert codes.keys() == {None, Code.VISION_ERROR, Code.OVERLOADED}
    assert num_refused == 1 + codes[Code.OVERLOADED] < NUM_SEEING / 2
    assert texts_s == pytest.approx(alone_s, abs=0.001) and max(texts_s.values()) < ENCODE_S


def test_replicas_with_the_same_speed_have_the_same_to_do() -> None:
    """Large and small images mixed: what counts is patches."""

    async def main() -> list[int]:
        async with sighted(2, cost=StepCost(step_ns=5_000_000)) as eyes:
            done = {id: list[int]() for id in eyes.encoders}
            for id, encoder in eyes.encoders.items():
                encoder.encode = counted(encoder.encode, done[id])  # type: ignore[method-assign]
            sizes = [(300, 300) if i % 2 else (40, 30) for i in range(12)]
            files = [picture("red", width + i, height) for i, (width, height) in enumerate(sizes)]
            submits = [await eyes.submit(file, request_id=f"r{i}") for i, file in enumerate(files)]
            await asyncio.gather(*map(eyes.core.finish, submits))
            assert await quiet(eyes.core, 2 * LEASE_S) == {}
            return [sum(numbers) for numbers in done.values()]

    few, many = sorted(run_virtual(main()))
    assert few > 0 and many / few < 1.3


def counted(encode: Any, done: list[int]) -> Any:
    async def encoded(images: list[Pixels]) -> list[bytes]:
        done.extend(image.shape[0] * image.shape[1] for image in images)
        await asyncio.sleep(sum(done[-len(images) :]) / 1e6)
        return list(await encode(images))

    return encoded


def test_the_balancer_can_be_replaced_at_any_time_and_without_it_the_end_is_typed() -> None:
    async def main() -> None:
        async with sighted(2, cost=StepCost(step_ns=5_000_000)) as eyes:
            for encoder in eyes.encoders.values():
                encoder.encode = slowly(encoder.encode)  # type: ignore[method-assign]
            loop = asyncio.get_running_loop()
            submits = [await eyes.submit(picture("red", 40 + i, 50), request_id=f"r{i}") for i in range(10)]
            running = [asyncio.create_task(eyes.core.finish(wanted)) for wanted in submits[:8]]
            await asyncio.sleep(ENCODE_S)
            eyes.core.kill("vision-balancer/vb0")
            running.append(asyncio.create_task(eyes.core.finish(submits[8])))
            await asyncio.sleep(1)
            await eyes.core.add_vision_balancer()  # it knows nothing but what replicas report
            assert {end for _, end in await asyncio.gather(*running)} == {LENGTH}
            eyes.core.kill("vision-balancer/vb0")
            begin_s = loop.time()
            _, end = await eyes.core.finish(submits[9])
            assert isinstance(end, Failed) and end.failure.code is Code.NO_REPLICA
            assert loop.time() - begin_s < PATIENCE_S + 1
            assert await quiet(eyes.core, 2 * LEASE_S) == {}

    run_virtual(main())
