"""Images between entrypoint, vision and prefill: what is held is let go, what is lost is done again or said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from actors.prefill import actor as prefill_actor
from actors.prefill.actor import Prefill
from actors.prefill.batch import Job
from actors.vision.actor import Vision
from bus import images as bus_images
from bus.bus import fail
from bus.subjects import EXITED, RESOLVE_IMAGE
from kernels.timed import StepCost
from schemas.bulk import Handle, Payload
from schemas.failure import Code
from schemas.handover import Dispatch
from schemas.liveness import ProcessExited
from schemas.request import Cancelled, Failed, Finished, FinishReason, Limits, Submit
from schemas.vision import Image, ImageEmbeddings, ResolveImage
from tests.actors.builders import dispatch, prompt_bytes, submit
from tests.actors.core import Core, core, quiet
from tests.actors.eyes import CONFIG, HIDDEN_SIZE, FakeEncoder
from tests.actors.pictures import picture
from tests.conftest import Run

TOKEN = 99
TIMEOUT_S = 10.0
LENGTH = Finished(reason=FinishReason.LENGTH)


class Sighted:
    """A core with vision replicas."""

    def __init__(self, system: Core) -> None:
        self.core = system
        self.encoders: dict[str, FakeEncoder] = {}

    async def with_vision(self, id: str) -> Vision:
        encoder = self.encoders[id] = FakeEncoder()
        name = f"vision/{id}"
        vision = Vision(id, await self.core.bus(name), await self.core.bulk(name), encoder, CONFIG)
        await self.core.add(vision)
        return vision

    async def submit(self, *files: bytes, request_id: str = "r1", **fields: Any) -> Submit:
        """A request of five tokens, an image, five tokens, an image, …"""
        bus, images, prompt = self.core.listener.bus, list[Image](), prompt_bytes(5)
        for file in files:
            wanted = ResolveImage(image=Payload(inline=file), tenant="t")
            found = await bus.ask(RESOLVE_IMAGE.any(), wanted, timeout_s=TIMEOUT_S)
            names = ("num_tokens", "digest", "width", "height", "vision", "pixels")
            images.append(Image(start=len(prompt) // 4, **{name: getattr(found, name) for name in names}))
            prompt += np.full(found.num_tokens, TOKEN, dtype="<u4").tobytes() + prompt_bytes(5)
        payload = Payload(inline=prompt)
        num = len(prompt) // 4
        return submit(request_id, prompt=payload, num_prompt_tokens=num, images=images, **fields)

    async def kill(self, id: str) -> None:
        """End a replica without a word, as a supervisor sees it."""
        self.core.kill(f"vision/{id}")
        exited = ProcessExited(name="eyes", pid=1, members=[f"vision/{id}"])
        await self.core.listener.bus.tell(EXITED.all(), exited)


@asynccontextmanager
async def sighted(num_vision: int = 1, **fields: Any) -> AsyncIterator[Sighted]:
    async with core(**fields) as system:
        eyes = Sighted(system)
        for index in range(num_vision):
            await eyes.with_vision(f"v{index}")
        yield eyes


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_images_change_what_follows_and_nothing_is_left(run_async: Run) -> None:
    async def main() -> None:
        async with sighted(2) as eyes:
            answers = []
            files = [(), (picture("red"),), (picture("blue"),), (picture("red"), picture("blue")), (picture("red"),)]
            for i, some in enumerate(files):
                tokens, end = await eyes.core.finish(await eyes.submit(*some, request_id=f"r{i}"))
                assert end == LENGTH
                answers.append(tokens)
            assert answers[1] == answers[4]
            assert len({tuple(answer) for answer in answers}) == 4
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_the_order_of_images_matters(run_async: Run) -> None:
    async def main() -> None:
        async with sighted() as eyes:
            red, blue = picture("red"), picture("blue")
            first, _ = await eyes.core.finish(await eyes.submit(red, blue, request_id="a"))
            second, _ = await eyes.core.finish(await eyes.submit(blue, red, request_id="b"))
            assert first != second

    run_async(main())


def test_without_vision_the_end_is_typed(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_images, "PATIENCE_S", 0.2)

    async def main() -> None:
        async with sighted() as eyes:
            wanted = await eyes.submit(picture())
            await eyes.kill("v0")
            _, end = await eyes.core.finish(wanted)
            assert isinstance(end, Failed) and end.failure.code is Code.NO_REPLICA
            assert "vision" in end.failure.message
            assert (await eyes.core.finish(submit("text")))[1] == LENGTH

    run_async(main())


def test_a_vision_replica_that_comes_back_in_time_is_waited_for(run_async: Run) -> None:
    async def main() -> None:
        async with sighted() as eyes:
            wanted = await eyes.submit(picture())
            await eyes.core.actors["vision/v0"].drain()  # it holds the pixels, and encodes nothing new
            await eyes.core.send(wanted)
            await eyes.with_vision("v1")
            await eyes.core.listener.over("r1").wait()
            assert eyes.core.listener.ends["r1"] == LENGTH
            assert len(eyes.encoders["v1"].encoded) == 1

    run_async(main())


def test_a_cancel_while_encoding_reaches_vision(run_async: Run) -> None:
    async def main() -> None:
        async with sighted() as eyes:
            vision = eyes.core.actors["vision/v0"]
            assert isinstance(vision, Vision)
            eyes.encoders["v0"].gate.clear()
            wanted = await eyes.submit(picture("red"), picture("blue"))
            await eyes.core.send(wanted)
            await until(lambda: len(vision._queue) == 2)
            assert (await eyes.core.cancel("r1")).was_running
            await eyes.core.listener.over("r1").wait()
            assert eyes.core.listener.ends["r1"] == Cancelled()
            await until(lambda: len(vision._queue) == 0)
            eyes.encoders["v0"].gate.set()
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_a_deadline_while_encoding_ends_the_request(run_async: Run) -> None:
    async def main() -> None:
        async with sighted() as eyes:
            eyes.encoders["v0"].gate.clear()
            now_ns = eyes.core.listener.bus.seams.clock_ns()
            limits = Limits(max_tokens=8, deadline_ns=now_ns + 10**8)
            _, end = await eyes.core.finish(await eyes.submit(picture(), limits=limits))
            assert isinstance(end, Failed) and end.failure.code is Code.DEADLINE_EXCEEDED
            eyes.encoders["v0"].gate.set()
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_a_replica_killed_at_its_work_is_replaced_by_another(run_async: Run) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            wanted = await eyes.submit(picture())
            calm, _ = await eyes.core.finish(wanted)
            wanted = await eyes.submit(picture(), request_id="r2")
            await eyes.core.actors["vision/v0"].drain()
            await eyes.with_vision("v1")
            await eyes.with_vision("v2")
            for id in ("v1", "v2"):
                eyes.encoders[id].gate.clear()
            await eyes.core.send(wanted)
            await until(lambda: any(eyes.encoders[id].at_it.is_set() for id in ("v1", "v2")))
            victim, other = ("v1", "v2") if eyes.encoders["v1"].at_it.is_set() else ("v2", "v1")
            eyes.encoders[other].gate.set()
            await eyes.kill(victim)
            await eyes.core.listener.over("r2").wait()
            assert eyes.core.listener.ends["r2"] == LENGTH
            assert eyes.core.listener.tokens["r2"] == calm
            assert len(eyes.encoders[other].encoded) == 1
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_an_image_at_which_two_replicas_ended_is_given_to_no_third(run_async: Run) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            wanted = await eyes.submit(picture())
            await eyes.core.actors["vision/v0"].drain()  # it holds the pixels, and encodes nothing new
            await eyes.core.send(wanted)
            for id in ("v1", "v2"):
                await eyes.with_vision(id)
                eyes.encoders[id].gate.clear()
                await eyes.encoders[id].at_it.wait()
                await eyes.kill(id)
            await eyes.with_vision("v3")
            await eyes.core.listener.over("r1").wait()
            end = eyes.core.listener.ends["r1"]
            assert isinstance(end, Failed) and end.failure.code is Code.VISION_ERROR
            assert eyes.encoders["v3"].encoded == []
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_images_lost_with_their_replica_are_a_typed_end(run_async: Run) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            eyes.encoders["v0"].gate.clear()
            wanted = await eyes.submit(picture())
            await eyes.core.send(wanted)
            await eyes.encoders["v0"].at_it.wait()
            await eyes.kill("v0")
            await eyes.with_vision("v1")  # restarted, without the pixels
            await eyes.core.listener.over("r1").wait()
            end = eyes.core.listener.ends["r1"]
            assert isinstance(end, Failed) and end.failure.code is Code.VISION_ERROR
            assert (await eyes.core.finish(await eyes.submit(picture(), request_id="r2")))[1] == LENGTH
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_lost_questions_are_asked_again(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_images, "TRY_S", 0.2)

    async def main() -> None:
        async with sighted(1) as eyes:
            wire, lost = eyes.core.wires["entrypoint/e0"], list[str]()
            publish = wire.publish

            async def lossy(subject: str, body: bytes, **rest: Any) -> None:
                if subject.endswith(".encode") and len(lost) < 2:
                    lost.append(subject)
                else:
                    await publish(subject, body, **rest)

            wire.publish = lossy  # type: ignore[method-assign]
            assert (await eyes.core.finish(await eyes.submit(picture())))[1] == LENGTH
            lost.clear()
            monkeypatch.setattr(bus_images, "TRIES", 2)
            _, end = await eyes.core.finish(await eyes.submit(picture(), request_id="r2"))
            assert isinstance(end, Failed) and end.failure.code is Code.DEADLINE_EXCEEDED
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_an_encoder_that_fails_is_a_typed_end(run_async: Run) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            eyes.encoders["v0"].error = RuntimeError("boom")
            _, end = await eyes.core.finish(await eyes.submit(picture("red"), picture("blue")))
            assert isinstance(end, Failed) and end.failure.code is Code.VISION_ERROR
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_of_a_request_that_failed_no_other_image_is_encoded(run_async: Run) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            vision, encoder = eyes.core.actors["vision/v0"], eyes.encoders["v0"]
            assert isinstance(vision, Vision)
            encode = encoder.encode
            encoder.gate.clear()

            async def fail_once(images: Any) -> list[bytes]:
                encoder.encode = encode  # type: ignore[method-assign]
                raise RuntimeError("boom")

            encoder.encode = fail_once  # type: ignore[method-assign]
            _, end = await eyes.core.finish(await eyes.submit(*map(picture, ("red", "blue", "green"))))
            assert isinstance(end, Failed) and end.failure.code is Code.VISION_ERROR
            await until(lambda: len(vision._queue) == 0)
            encoder.gate.set()
            assert await quiet(eyes.core) == {}
            assert len(encoder.encoded) <= 1  # what was begun meanwhile

    run_async(main())


@pytest.mark.parametrize("num_losses", [1, 2])
def test_embeddings_that_prefill_cannot_get_are_encoded_once_more(run_async: Run, num_losses: int) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            left, bulk = num_losses, eyes.core.bulks["prefill/p0"]
            pull = bulk.pull

            async def lossy_pull(handle: Handle, *, timeout_s: float) -> bytes:
                nonlocal left
                if left:
                    left -= 1
                    raise fail(Code.TRANSFER_FAILED, "lost")
                return await pull(handle, timeout_s=timeout_s)

            bulk.pull = lossy_pull  # type: ignore[method-assign]
            _, end = await eyes.core.finish(await eyes.submit(picture()))
            if num_losses == 1:
                assert end == LENGTH
            else:
                assert isinstance(end, Failed) and end.failure.code is Code.VISION_ERROR
            assert len(eyes.encoders["v0"].encoded) == 2
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_a_replica_without_room_for_images_refuses_and_another_takes_them(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            wanted = await eyes.submit(picture())
            monkeypatch.setattr(prefill_actor, "MAX_IMAGE_BYTES", 0)
            await eyes.core.send(wanted)
            await until(lambda: len(eyes.encoders["v0"].encoded) == 1)
            await asyncio.sleep(0.05)
            assert "r1" not in eyes.core.listener.ends
            monkeypatch.undo()
            await eyes.core.listener.over("r1").wait()
            assert eyes.core.listener.ends["r1"] == LENGTH
            assert len(eyes.encoders["v0"].encoded) == 1  # the same embeddings served all attempts
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_images_the_engine_does_not_take_end_their_request_only(run_async: Run) -> None:
    async def main() -> None:
        async with sighted(1, cost=StepCost(step_ns=1000)) as eyes:
            prefill = eyes.core.actors["prefill/p0"]
            assert isinstance(prefill, Prefill)

            def attach(key: str, images: Any) -> None:
                raise ValueError("no vision here")

            prefill._engine.attach = attach  # type: ignore[method-assign]
            others = [asyncio.create_task(eyes.core.finish(submit(f"t{i}"))) for i in range(3)]
            _, end = await eyes.core.finish(await eyes.submit(picture()))
            assert isinstance(end, Failed) and end.failure.code is Code.VISION_ERROR
            assert [end for _, end in await asyncio.gather(*others)] == [LENGTH] * 3
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_exact_reaches_prefill(run_async: Run) -> None:
    async def main() -> None:
        async with core() as system:
            prefill, seen = system.actors["prefill/p0"], dict[str, bool]()
            assert isinstance(prefill, Prefill)
            admit = prefill.batch.admit

            def spy(engine: Any) -> tuple[list[Job], list[Job]]:
                seen.update({job.id: job.dispatch.exact for job in prefill.batch})
                return admit(engine)

            prefill.batch.admit = spy  # type: ignore[method-assign]
            await system.finish(submit("a", exact=True))
            await system.finish(submit("b"))
            assert seen == {"a": True, "b": False}

    run_async(main())


# What a prefill replica was given


def with_images(*images: ImageEmbeddings, prompt: list[int]) -> tuple[Dispatch, bytes]:
    plain = dispatch(num_tokens=len(prompt))
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__} | {"images": list(images)}
    return Dispatch(**fields), np.asarray(prompt, dtype="<u4").tobytes()


def rows(num_tokens: int) -> bytes:
    return b"\x01" * (4 * HIDDEN_SIZE * num_tokens)


def at(start: int, num_tokens: int) -> ImageEmbeddings:
    handle = Handle(address="mem://x", key="k", generation=1, size_bytes=1, checksum=0)
    return ImageEmbeddings(start=start, num_tokens=num_tokens, embeddings=handle)


def test_a_job_has_the_rows_of_its_images() -> None:
    message, prompt = with_images(at(1, 2), at(4, 1), prompt=[7, TOKEN, TOKEN, 8, TOKEN])
    job = Job.of(message, prompt, [rows(2), rows(1)])
    assert [(image.start, len(image.embeddings)) for image in job.images] == [(1, len(rows(2))), (4, len(rows(1)))]
    assert job.num_left == 5


@pytest.mark.parametrize(
    ("images", "given"),
    [
        ([at(1, 3)], [rows(3)]),  # not all of them the same token
        ([at(4, 2)], [rows(2)]),  # past the end
        ([at(1, 0)], [rows(1)]),
        ([at(1, 2)], [b""]),
        ([at(1, 2)], [rows(2)[:-1]]),
    ],
)
def test_what_was_not_announced_is_no_job(images: list[ImageEmbeddings], given: list[bytes]) -> None:
    message, prompt = with_images(*images, prompt=[7, TOKEN, TOKEN, 8, TOKEN])
    with pytest.raises(ValueError, match="image"):
        Job.of(message, prompt, given)
    with pytest.raises(ValueError, match="prompt tokens"):
        Job.of(message, prompt[:-4], given)
