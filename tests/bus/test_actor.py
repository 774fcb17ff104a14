"""The actor contract, on a small echo."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from bus.actor import Actor, Envelope, Handler
from bus.bus import DEADLINE_HEADER, Bus, BusError, fail
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import CANCEL, EXITED, Address, Subject
from schemas.failure import Code
from schemas.liveness import ProcessExited
from schemas.message import Message, Role
from schemas.request import Cancel, CancelAcknowledged
from schemas.routing import Release
from tests.bus.conformance import TIMEOUT_S, ActorConformance, Boom, Stage, boom
from tests.conftest import Run

ECHO_CANCEL: Subject[Cancel, CancelAcknowledged] = CANCEL
ECHO_TELL: Subject[Release, None] = Subject(Role.ENTRYPOINT, "release", Release)


class Echo(Actor):
    """Acknowledges, by what the request id says; remembers what it was told."""

    role = Role.ENTRYPOINT

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.told: list[int] = []
        self.flushed: list[int] = []
        self.exited: list[str] = []
        self.contexts: list[int] = []
        self.waiting: Envelope | None = None

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {ECHO_CANCEL: self._on_cancel, ECHO_TELL: self._on_tell}

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        return {EXITED.at("supervisor"): self._on_exited}

    async def flush(self) -> None:
        self.flushed.append(len(self.told))

    async def _on_cancel(self, message: Cancel, envelope: Envelope) -> Message | None:
        self.contexts.append(trace.get_current_span(envelope.context).get_span_context().trace_id)
        match message.request_id:
            case "refuse":
                raise fail(Code.NOT_FOUND, "no such request")
            case "crash":
                await boom()
            case "later":
                self.waiting = envelope
                return None
            case "twice":
                await envelope.answer(CancelAcknowledged(request_id="first", was_running=True))
        return CancelAcknowledged(request_id=message.request_id, was_running=False)

    async def _on_tell(self, message: Release, envelope: Envelope) -> None:
        if message.reservation < 0:
            raise fail(Code.BAD_REQUEST, "negative")
        self.told.append(message.reservation)

    async def _on_exited(self, message: ProcessExited, envelope: Envelope) -> None:
        self.exited.append(message.name)


class TestEcho(ActorConformance):
    """The suite, on the echo."""

    def make(self, bus: Bus) -> Echo:
        return Echo("echo-1", bus)


def on_stage(run_async: Run, play: Any) -> None:
    """Run `play(stage, echo)` with an echo on stage."""

    async def main() -> None:
        async with TestEcho().stage() as stage:
            assert isinstance(stage.actor, Echo)
            await play(stage, stage.actor)

    run_async(main())


async def ask(stage: Stage, request_id: str) -> CancelAcknowledged:
    return await stage.client.ask(ECHO_CANCEL.at(stage.actor.id), Cancel(request_id=request_id), timeout_s=TIMEOUT_S)


def test_messages_are_handled_in_order_and_flushed_once_per_burst(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        for i in range(100):
            await stage.client.tell(ECHO_TELL.at("echo-1"), Release(reservation=i))
        await ask(stage, "x")
        assert echo.told == list(range(100))
        assert len(echo.flushed) < 10, "a burst was flushed message by message"
        await ask(stage, "y")
        assert echo.flushed[-1] == 100

    on_stage(run_async, play)


def test_who_takes_long_to_start_answers_pings_meanwhile(run_async: Run) -> None:
    class Slow(Echo):
        async def on_start(self) -> None:
            is_starting.set()
            await may_start.wait()

    is_starting, may_start = asyncio.Event(), asyncio.Event()

    async def main() -> None:
        broker = MemoryBroker()
        buses = [Bus(MemoryWire(broker)) for _ in range(2)]
        for bus in buses:
            await bus.open()
        stage = Stage(actor := Slow("echo-1", buses[0]), buses[1])
        starting = asyncio.create_task(stage.start())
        await is_starting.wait()
        asking = asyncio.create_task(ask(stage, "x"))
        assert (await stage.ping()).incarnation == actor.incarnation
        assert not starting.done() and not asking.done()
        may_start.set()
        await starting
        await asking
        assert (await stage.ping()).num_queued == 0
        await stage.stop()

    run_async(main())


def test_wake_flushes_without_a_message(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        await ask(stage, "x")
        num = len(echo.flushed)
        echo.wake()
        async with asyncio.timeout(TIMEOUT_S):
            while len(echo.flushed) == num:
                await asyncio.sleep(0)

    on_stage(run_async, play)


def test_an_answer_can_come_later_and_only_once(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        asking = asyncio.create_task(ask(stage, "later"))
        assert (await ask(stage, "twice")).request_id == "first"
        assert echo.waiting is not None
        await echo.waiting.answer(CancelAcknowledged(request_id="late", was_running=True))
        await echo.waiting.answer(CancelAcknowledged(request_id="later still", was_running=True))
        assert (await asking).request_id == "late"

    on_stage(run_async, play)


def test_a_bus_error_is_the_answer_and_not_a_crash(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        with pytest.raises(BusError) as caught:
            await ask(stage, "refuse")
        assert caught.value.code == Code.NOT_FOUND
        await stage.client.tell(ECHO_TELL.at("echo-1"), Release(reservation=-1))
        assert (await ask(stage, "x")).request_id == "x"

    on_stage(run_async, play)


def test_a_crash_in_a_handler_ends_the_actor_and_answers_the_asker(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        with pytest.raises(BusError) as caught:
            await ask(stage, "crash")
        assert caught.value.code == Code.SHUTTING_DOWN
        with pytest.raises(Boom):
            await stage.end()

    on_stage(run_async, play)


def test_spawned_work_that_is_cancelled_by_nobody_is_a_crash(run_async: Run) -> None:
    async def cancel_itself() -> None:
        raise asyncio.CancelledError

    async def play(stage: Stage, echo: Echo) -> None:
        echo.spawn(asyncio.sleep(3600)).cancel()  # asked for: not a crash
        await ask(stage, "x")
        echo.spawn(cancel_itself())
        with pytest.raises(RuntimeError, match="cancellation nobody asked for"):
            await stage.end()

    on_stage(run_async, play)


def test_events_of_others_are_heard(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        await stage.client.tell(EXITED.at("supervisor"), ProcessExited(name="decode-1", pid=7, members=[]))
        await ask(stage, "x")
        assert echo.exited == ["decode-1"]

    on_stage(run_async, play)


def test_an_ask_past_its_deadline_is_not_handled(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        for deadline in ("1", "not a number"):
            body = msgspec.msgpack.encode(Release(reservation=len(deadline)))
            headers = {DEADLINE_HEADER: deadline}
            await stage.client.wire.publish(ECHO_TELL.at("echo-1").name, body, headers=headers)
        await ask(stage, "x")
        assert echo.told == [len("not a number")]

    on_stage(run_async, play)


def test_the_askers_trace_is_the_handlers_context(run_async: Run) -> None:
    async def play(stage: Stage, echo: Echo) -> None:
        with TracerProvider().get_tracer("test").start_as_current_span("outer") as span:
            await ask(stage, "x")
        await ask(stage, "y")
        assert echo.contexts == [span.get_span_context().trace_id, 0]

    on_stage(run_async, play)
