"""Vision replicas and embeddings that are lost: what can be done again is, the rest is said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from actors.vision.actor import Vision
from bus import images as bus_images
from bus.bus import fail
from bus.subjects import EXITED
from kernels.timed import StepCost
from schemas.bulk import Handle
from schemas.failure import Code
from schemas.liveness import ProcessExited
from schemas.request import Failed, Finished, FinishReason, Limits
from schemas.vision import ImageResolved
from tests.actors.builders import submit
from tests.actors.core import quiet
from tests.actors.pictures import picture
from tests.actors.sight import sighted, until
from tests.conftest import Run

LENGTH = Finished(reason=FinishReason.LENGTH)


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


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_request_with_images_goes_on_when_its_replica_is_killed(run_async: Run, role: str, is_seen: bool) -> None:
    """As long as vision holds the pixels, until its prompt is computed, or remembers what it saw. With cached blocks,
    of which there are none here, it would not have to."""

    async def main() -> None:
        async with sighted(1) as eyes:
            system, max_tokens = eyes.core, 8 if role == "prefill" else 200
            limits = Limits(max_tokens=max_tokens)
            calm, _ = await system.finish(structs.replace(await eyes.submit(picture()), limits=limits))
            wanted = await eyes.submit(picture(), request_id="r2")
            await system.actors["decode/d0"].drain()
            if role == "decode":
                await system.with_decode("d1", StepCost(step_ns=5_000_000))
            await system.send(structs.replace(wanted, limits=limits))
            await until(lambda: [one.owner and one.owner.role for one in system.entrypoint.shard.live()] == [role])
            await asyncio.sleep(0.05)
            if not is_seen:
                await eyes.kill("v0")
                await eyes.with_vision("v1")
            name = "prefill/p0" if role == "prefill" else "decode/d1"
            system.kill(name)
            await system.with_prefill("p1")
            await system.with_decode("d2")
            exited = ProcessExited(name="x", pid=system.pids[name], members=[name])
            await system.listener.bus.tell(EXITED.all(), exited)
            await system.listener.over("r2").wait()
            end = system.listener.ends["r2"]
            if is_seen:
                assert (system.listener.tokens["r2"], end) == (calm, LENGTH)
            else:
                assert isinstance(end, Failed) and end.failure.code is Code.VISION_ERROR
            assert await quiet(system) == {}

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
            assert isinstance(end, Failed) and end.failure.code is Code.WORKER_LOST
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
def test_embeddings_that_prefill_cannot_get_are_asked_for_once_more(run_async: Run, num_losses: int) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            left, num_asked, bulk = num_losses, 0, eyes.core.bulks["prefill/p0"]
            vision = eyes.core.actors["vision/v0"]
            assert isinstance(vision, Vision)
            answer = vision._answer

            async def counted(*arguments: Any) -> None:
                nonlocal num_asked
                num_asked += 1
                await answer(*arguments)

            vision._answer = counted  # type: ignore[method-assign]
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
            assert num_asked == 2 and len(eyes.encoders["v0"].encoded) == 1  # vision has them still
            assert await quiet(eyes.core) == {}

    run_async(main())


def test_a_request_of_many_images_leaves_turns_to_others(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vision looks at files in the order they came in: one request is not to be all of them."""

    async def main() -> None:
        async with sighted(1) as eyes:
            bus = await eyes.core.bus("recipe/many")
            vision = bus_images.AnyVision(bus, await eyes.core.bulk("recipe/many"))
            ask, in_flight, most = bus.ask, 0, 0

            async def counted(*arguments: Any, **rest: Any) -> Any:
                nonlocal in_flight, most
                in_flight += 1
                most = max(most, in_flight)
                try:
                    return await ask(*arguments, **rest)
                finally:
                    in_flight -= 1

            monkeypatch.setattr(bus, "ask", counted)
            found = await vision.resolve([picture()] * 9, 0, lambda: False)
            assert all(isinstance(image, ImageResolved) for image in found) and len(found) == 9
            assert most == bus_images.AT_ONCE

    run_async(main())
