"""What every actor must do. Subclass `ActorConformance` as `Test<Actor>`, override `make` (and `peers`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest

from bus.actor import Actor
from bus.bus import Bus, BusError, Delivery, decoder
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import LOAD, Subject, drain, ping, report_load
from schemas.failure import Code, Failure
from schemas.liveness import Drain, Ping, Pong
from schemas.routing import LoadReported, ReportLoad
from tests.conftest import Run

TIMEOUT_S = 10.0


class Boom(Exception):
    """A planted crash."""


async def boom(*_: Any) -> NoReturn:
    """Crash."""
    raise Boom


async def hang(*_: Any) -> NoReturn:
    """Never return."""
    await asyncio.Event().wait()
    raise AssertionError


class Stage:
    """An actor on a memory bus, and a client on a connection of its own."""

    def __init__(self, actor: Actor, client: Bus) -> None:
        self.actor = actor
        self.client = client
        self.reports: list[LoadReported] = []
        self._running: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Return when the actor is ready; raise if it ends before."""
        await self.client.wire.subscribe(LOAD.at(self.actor.role).name, self._on_report)
        ready = asyncio.Event()
        self._running = asyncio.create_task(self.actor.run(ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._running, waiting}, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            await self.stop()
            raise AssertionError("the actor did not get ready")

    async def stop(self) -> None:
        """Cancel the actor, as a supervisor does."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running}, timeout=TIMEOUT_S)
            assert self._running.done(), "the actor ignored its cancellation"

    async def end(self) -> None:
        """Wait until the actor ends by itself; raise what it raised."""
        assert self._running is not None
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait({self._running})
        await self._running

    async def ping(self) -> Pong:
        """Ask the actor, by its id."""
        return await self.client.ask(ping(self.actor.role).at(self.actor.id), Ping(), timeout_s=TIMEOUT_S)

    async def until_report(self, num: int) -> LoadReported:
        """The num-th report from now on back to the start, from 1."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.reports) < num:
                self._news.clear()
                await self._news.wait()
        return self.reports[num - 1]

    def _on_report(self, delivery: Delivery) -> None:
        report: LoadReported = decoder(LoadReported).decode(delivery.body)
        if report.id == self.actor.id:
            self.reports.append(report)
            self._news.set()


class ActorConformance:
    """The suite. One actor per test, on a memory bus, on both event loops."""

    def make(self, bus: Bus) -> Actor:
        """A new actor, not started."""
        raise NotImplementedError

    @asynccontextmanager
    async def peers(self, bus: Bus) -> AsyncIterator[None]:
        """Whatever the actor needs around it to become ready, on a bus of its own."""
        yield

    @asynccontextmanager
    async def stage(self, *, is_started: bool = True) -> AsyncIterator[Stage]:
        """Actor, client and peers; stopped and closed at the end."""
        broker = MemoryBroker()
        buses = [Bus(MemoryWire(broker)) for _ in range(3)]
        for bus in buses:
            await bus.open()
        async with self.peers(buses[2]):
            stage = Stage(self.make(buses[0]), buses[1])
            try:
                if is_started:
                    await stage.start()
                yield stage
            finally:
                await stage.stop()
                for bus in buses:
                    await bus.close()

    def test_it_is_ready_and_answers_ping_under_every_name(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                subject = ping(stage.actor.role)
                for address in (subject.at(stage.actor.id), subject.any(), subject.all()):
                    pong = await stage.client.ask(address, Ping(), timeout_s=TIMEOUT_S)
                    assert (pong.role, pong.id) == (stage.actor.role, stage.actor.id)
                    assert pong.incarnation == stage.actor.incarnation != ""

        run_async(main())

    def test_it_reports_its_load_at_the_start_and_when_asked(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                first = await stage.until_report(1)
                assert (first.role, first.incarnation) == (stage.actor.role, stage.actor.incarnation)
                num = len(stage.reports)
                await stage.client.tell(report_load(stage.actor.role).all(), ReportLoad())
                await stage.until_report(num + 1)
                seqs = [report.seq for report in stage.reports]
                assert seqs == sorted(set(seqs))

        run_async(main())

    def test_draining_is_reported_and_leaves_it_alive(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                num = len(stage.reports)
                await stage.actor.drain()
                await stage.actor.drain()
                assert not (await stage.until_report(num + 1)).is_accepting
                assert (await stage.ping()).id == stage.actor.id

        run_async(main())

    def test_told_to_leave_it_ends_by_itself_and_says_so(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                address = drain(stage.actor.role).at(stage.actor.id)
                earlier = Drain(grace_s=0.0, incarnation="of an earlier one")
                assert (await stage.client.ask(address, earlier, timeout_s=TIMEOUT_S)).is_accepting
                asks = [Drain(grace_s=30.0), Drain(grace_s=0.0, incarnation=stage.actor.incarnation)]
                answers = [stage.client.ask(address, ask, timeout_s=TIMEOUT_S) for ask in asks]
                for report in await asyncio.gather(*answers):
                    assert (report.id, report.is_accepting) == (stage.actor.id, False)
                    assert report.num_running == report.num_waiting == 0
                await stage.end()
                assert stage.actor._is_stopped

        run_async(main())

    def test_stopping_twice_is_stopping_once(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                await stage.stop()
                await stage.actor.stop()
                with pytest.raises(BusError) as caught:
                    await stage.ping()
                assert caught.value.code == Code.NO_RESPONDERS
                leftover = {task for task in asyncio.all_tasks() if task.get_name().endswith(f"/{stage.actor.id}")}
                assert leftover == set(), "work it spawned is still running"

        run_async(main())

    def test_stopping_before_starting_is_harmless(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage(is_started=False) as stage:
                await stage.actor.stop()

        run_async(main())

    def test_a_failed_start_is_raised_and_leaves_nobody_listening(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage(is_started=False) as stage:
                stage.actor.on_start = boom  # type: ignore[method-assign]
                with pytest.raises(Boom):
                    await stage.actor.run(lambda: pytest.fail("it said it was ready"))
                with pytest.raises(BusError) as caught:
                    await stage.ping()
                assert caught.value.code == Code.NO_RESPONDERS

        run_async(main())

    def test_asks_pending_at_the_stop_are_answered(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage(is_started=False) as stage:
                stage.actor._on_ping = hang  # type: ignore[method-assign]
                await stage.start()
                asking = [asyncio.create_task(stage.ping()) for _ in range(3)]
                async with asyncio.timeout(TIMEOUT_S):
                    while len(stage.actor._pending) < 3:
                        await asyncio.sleep(0)
                await stage.stop()
                for failure in await asyncio.gather(*asking, return_exceptions=True):
                    assert isinstance(failure, BusError)
                    assert failure.code == Code.SHUTTING_DOWN

        run_async(main())

    def test_a_full_mailbox_answers_overloaded(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage(is_started=False) as stage:
                stage.actor._on_ping = hang  # type: ignore[method-assign]
                await stage.start()
                held = asyncio.create_task(stage.ping())
                async with asyncio.timeout(TIMEOUT_S):
                    while not stage.actor._pending or stage.actor._mailbox:
                        await asyncio.sleep(0)
                stage.actor.mailbox_limit = 2  # type: ignore[misc]
                queued = [asyncio.create_task(stage.ping()) for _ in range(2)]
                await asyncio.sleep(0)
                with pytest.raises(BusError) as caught:
                    await stage.ping()
                assert caught.value.code == Code.OVERLOADED
                assert stage.actor.num_dropped >= 1
                await stage.stop()
                await asyncio.gather(held, *queued, return_exceptions=True)

        run_async(main())

    def test_a_crash_of_spawned_work_is_the_actors_crash(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                stage.actor.spawn(boom())
                with pytest.raises(Boom):
                    await stage.end()
                with pytest.raises(BusError) as caught:
                    await stage.ping()
                assert caught.value.code == Code.NO_RESPONDERS

        run_async(main())

    def test_undecodable_messages_are_refused_and_survived(self, run_async: Run) -> None:
        async def main() -> None:
            async with self.stage() as stage:
                subjects: list[Subject[Any, Any]] = [ping(stage.actor.role), *stage.actor.handlers()]
                names = [subject.at(stage.actor.id).name for subject in subjects]
                names += [address.name for address in stage.actor.events()]
                for name in names:
                    for junk in (b"", b"\xc1", b"\x80", b"{}", b"\x81\xa4type\xa6Nobody"):
                        await stage.client.wire.publish(name, junk)
                for subject in subjects:
                    with pytest.raises(BusError) as caught:
                        await _ask_raw(stage.client, subject.at(stage.actor.id).name, b"\xc1")
                    assert caught.value.code == Code.BAD_REQUEST
                await stage.client.wire.publish(f"shoal.{stage.actor.role}.{stage.actor.id}.nonsense", b"\xc1")
                assert (await stage.ping()).id == stage.actor.id

        run_async(main())


async def _ask_raw(client: Bus, name: str, body: bytes) -> None:
    """Ask with bytes of our own; raises what a typed ask would."""
    answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
    unsubscribe = await client.wire.subscribe(f"{client.wire.inbox}.raw.answer", answer.set_result)
    await client.wire.publish(name, body, reply=f"{client.wire.inbox}.raw.answer")
    async with asyncio.timeout(TIMEOUT_S):
        failure: Failure = decoder(Failure).decode((await answer).body)
    await unsubscribe()
    raise BusError(failure)
