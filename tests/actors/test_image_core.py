"""Images between entrypoint, vision and prefill: they change what follows, and what is held for them is let go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from actors.prefill import jobs as prefill_jobs
from actors.prefill.actor import Prefill
from actors.prefill.job import Job
from actors.vision.actor import Vision
from bus.bus import BusError, fail
from bus.subjects import CANCEL_PREFILL, DISPATCH
from kernels.timed import StepCost
from schemas.bulk import Handle, Payload
from schemas.failure import Code
from schemas.handover import Refused
from schemas.request import Cancel, Cancelled, Failed, Finished, FinishReason, Limits
from tests.actors.builders import dispatch, prompt_bytes, submit
from tests.actors.core import core, quiet
from tests.actors.pictures import picture
from tests.actors.sight import sighted, until
from tests.conftest import Run

LENGTH = Finished(reason=FinishReason.LENGTH)


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


def test_a_replica_without_room_for_images_refuses_and_another_takes_them(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with sighted(1) as eyes:
            wanted = await eyes.submit(picture())
            monkeypatch.setattr(prefill_jobs, "MAX_IMAGE_BYTES", 0)
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


def test_requests_that_still_pull_count(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_jobs, "MAX_QUEUED", 1)

    async def main() -> None:
        async with core() as system:
            bulk, gate = system.bulks["prefill/p0"], asyncio.Event()

            async def never_pull(handle: Handle, *, timeout_s: float) -> bytes:
                await gate.wait()
                raise fail(Code.TRANSFER_FAILED, "lost")

            bulk.pull = never_pull  # type: ignore[method-assign]
            handle = Handle(address="mem://x", key="k", generation=1, size_bytes=20, checksum=0)
            sent = [structs.replace(dispatch(f"r{i}"), prompt=Payload(handle=handle)) for i in range(2)]
            bus = system.listener.bus
            first = asyncio.create_task(bus.ask(DISPATCH.at("p0"), sent[0], timeout_s=5))
            await asyncio.sleep(0)
            assert isinstance(await bus.ask(DISPATCH.at("p0"), sent[1], timeout_s=5), Refused)
            gate.set()
            with pytest.raises(BusError, match="lost"):
                await first

    run_async(main())


def test_a_cancel_right_behind_its_dispatch_finds_it(run_async: Run) -> None:
    async def main() -> None:
        async with core() as system:
            bus, bulk = system.listener.bus, await system.bulk("recipe/rc0")
            handle = bulk.offer(prompt_bytes(5), lease_s=60)
            sent = structs.replace(dispatch(), prompt=Payload(handle=handle))
            asked = asyncio.create_task(bus.ask(DISPATCH.at("p0"), sent, timeout_s=5))
            await asyncio.sleep(0)
            cancel = Cancel(request_id="r1", epoch=1)
            assert (await bus.ask(CANCEL_PREFILL.at("p0"), cancel, timeout_s=5)).was_running
            with pytest.raises(BusError, match="cancelled"):
                await asked

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

            def spy(engine: Any, num_leaving: int) -> tuple[list[Job], list[Job]]:
                seen.update({job.id: job.dispatch.exact for job in prefill.batch})
                return admit(engine, num_leaving)

            prefill.batch.admit = spy  # type: ignore[method-assign]
            await system.finish(submit("a", exact=True))
            await system.finish(submit("b"))
            assert seen == {"a": True, "b": False}

    run_async(main())
