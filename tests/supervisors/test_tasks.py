"""The task supervisor: order, strategies, crashes of every kind, nesting, and a child that will not end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import pytest

from supervisors.strategy import GaveUp, Intensity, Restart, Strategy
from supervisors.tasks import Child, Ready, Run, Stuck, Supervisor
from tests.conftest import Run as RunAsync


class World:
    """Children that write what happens to them, and end when told to."""

    def __init__(self) -> None:
        self.history: list[str] = []
        self.ends: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()

    def note(self, entry: str) -> None:
        self.history.append(entry)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def take(self) -> list[str]:
        taken, self.history = self.history, []
        return taken

    def child(self, name: str, restart: Restart = Restart.PERMANENT) -> Child:
        async def run(ready: Ready) -> None:
            self.ends[name] = asyncio.get_running_loop().create_future()
            self.note(f"+{name}")
            try:
                await asyncio.sleep(0)
                ready()
                await self.ends[name]
            finally:
                self.note(f"-{name}")

        return Child(name, run, restart)

    async def count(self, entry: str, number: int) -> None:
        await self.until(lambda: self.history.count(entry) >= number)


async def start(supervisor: Supervisor) -> asyncio.Task[None]:
    """Run a supervisor until its children are up."""
    is_ready = asyncio.Event()
    task = asyncio.create_task(supervisor.run(is_ready.set))
    waiting = asyncio.create_task(is_ready.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_starts_in_order_each_when_the_one_before_is_ready_and_stops_in_reverse(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        may_be_ready = asyncio.Event()

        async def slow(ready: Ready) -> None:
            world.note("+slow")
            await may_be_ready.wait()
            ready()
            await asyncio.Event().wait()

        supervisor = Supervisor("s", [world.child("a"), Child("slow", slow), world.child("b")])
        starting = asyncio.create_task(start(supervisor))
        await world.count("+slow", 1)
        await asyncio.sleep(0.01)
        assert world.history == ["+a", "+slow"]
        may_be_ready.set()
        task = await starting
        assert world.take() == ["+a", "+slow", "+b"]
        await stop(task)
        assert world.take() == ["-b", "-a"]

    run_async(main())


def test_children_that_wait_for_each_other_start_and_stop_together(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        there, gone = asyncio.Barrier(2), asyncio.Barrier(2)

        def rank(name: str) -> Child:
            async def run(ready: Ready) -> None:
                world.note(f"+{name}")
                try:
                    await there.wait()
                    ready()
                    await asyncio.Event().wait()
                finally:
                    await gone.wait()
                    world.note(f"-{name}")

            return Child(name, run)

        task = await start(Supervisor("s", [rank("a"), rank("b")], together=True))
        assert world.take() == ["+a", "+b"] and not task.done()
        await stop(task)
        assert sorted(world.take()) == ["-a", "-b"]

    run_async(main())


def test_one_of_several_that_start_together_and_fails_is_not_waited_for(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()

        async def waits(ready: Ready) -> None:
            world.note("+waits")
            try:
                await asyncio.Event().wait()
            finally:
                world.note("-waits")

        async def fails(ready: Ready) -> None:
            raise ValueError("no such model")

        task = await start(Supervisor("s", [Child("waits", waits), Child("fails", fails)], together=True))
        with pytest.raises(GaveUp, match="fails did not start: .*no such model") as raised:
            await task
        assert raised.value.child == "fails" and world.take() == ["+waits", "-waits"]

    run_async(main())


@pytest.mark.parametrize(
    ("strategy", "history"),
    [
        (Strategy.ONE_FOR_ONE, ["-b", "+b"]),
        (Strategy.REST_FOR_ONE, ["-b", "-c", "+b", "+c"]),
        (Strategy.ONE_FOR_ALL, ["-b", "-c", "-a", "+a", "+b", "+c"]),
    ],
)
def test_a_crash_restarts_what_the_strategy_says(run_async: RunAsync, strategy: Strategy, history: list[str]) -> None:
    async def main() -> None:
        world = World()
        task = await start(Supervisor("s", [world.child(n) for n in "abc"], strategy=strategy))
        world.take()
        world.ends["b"].set_exception(ValueError("boom"))
        await world.until(lambda: world.history == history)
        await stop(task)
        assert world.take()[len(history) :] == ["-c", "-b", "-a"]  # the order of the list, not of the restarts

    run_async(main())


def test_what_a_crashed_child_held_is_free_when_it_starts_again(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        held: list[weakref.ref[World]] = []

        def fail(weights: World) -> None:
            raise ValueError(weights.history)

        async def run(ready: Ready) -> None:
            weights = World()
            world.note("free" if held and held[0]() is None else "+")
            held.append(weakref.ref(weights))
            ready()
            await asyncio.sleep(0)
            if len(held) > 1:
                await asyncio.Event().wait()
            try:
                fail(weights)
            except ValueError:
                del weights
                raise RuntimeError("boom") from None

        task = await start(Supervisor("s", [Child("a", run)]))
        await world.until(lambda: len(world.history) == 2)
        await stop(task)
        assert world.take() == ["+", "free"]

    run_async(main())


def test_a_child_that_cancels_itself_has_crashed(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        task = await start(Supervisor("s", [world.child("a", Restart.TRANSIENT)]))
        world.ends["a"].cancel()  # what the child awaits is cancelled, not the child
        await world.count("+a", 2)
        await stop(task)

    run_async(main())


def test_restart_types_after_a_normal_exit(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        kinds = {"p": Restart.PERMANENT, "t": Restart.TRANSIENT, "x": Restart.TEMPORARY}
        task = await start(Supervisor("s", [world.child(name, kind) for name, kind in kinds.items()]))
        for name in ("t", "x", "p"):
            world.ends[name].set_result(None)
        await world.count("+p", 2)
        assert world.history.count("+t") == world.history.count("+x") == 1
        await stop(task)

    run_async(main())


def test_gives_up_past_its_intensity_and_stops_the_others(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        supervisor = Supervisor("s", [world.child("a"), world.child("b")], intensity=Intensity(1, 1000.0))
        task = await start(supervisor)
        world.ends["b"].set_exception(ValueError())
        await world.count("+b", 2)
        world.ends["b"].set_exception(ValueError())
        with pytest.raises(GaveUp, match="b ended once too often"):
            await task
        assert world.history[-2:] == ["-b", "-a"]

    run_async(main())


def test_gives_up_at_once_when_a_child_fails_its_first_start(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()

        async def broken(ready: Ready) -> None:
            raise ValueError("no such folder")

        task = await start(Supervisor("s", [world.child("a"), Child("broken", broken), world.child("b")]))
        with pytest.raises(GaveUp, match="broken did not start.*no such folder"):
            await task
        assert world.take() == ["+a", "-a"]

    run_async(main())


def test_a_failing_restart_counts_and_covers_those_behind_it(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        good = world.child("b")
        num_starts = 0

        async def flaky(ready: Ready) -> None:
            nonlocal num_starts
            num_starts += 1
            if num_starts in (2, 3):
                raise ValueError("not yet")
            await good.run(ready)

        children = [world.child("a"), Child("b", flaky), world.child("c")]
        task = await start(Supervisor("s", children, strategy=Strategy.REST_FOR_ONE))
        world.take()
        world.ends["b"].set_exception(ValueError())
        await world.count("+c", 1)
        assert world.take() == ["-b", "-c", "+b", "+c"]
        assert num_starts == 4
        await stop(task)

    run_async(main())


def test_a_slow_restart_does_not_keep_others_from_theirs(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        num_starts = 0

        async def slow(ready: Ready) -> None:
            nonlocal num_starts
            num_starts += 1
            world.note("+slow")
            if num_starts == 1:
                ready()
                await asyncio.sleep(0)
                raise ValueError
            await asyncio.Event().wait()  # never ready again

        task = await start(Supervisor("s", [Child("slow", slow), world.child("b")]))
        await world.count("+slow", 2)
        world.ends["b"].set_exception(ValueError())
        await world.count("+b", 2)
        await stop(task)

    run_async(main())


def test_nested_supervisors_multiply_their_restarts(run_async: RunAsync) -> None:
    async def main() -> None:
        starts: list[str] = []

        async def crashing(ready: Ready) -> None:
            starts.append("leaf")
            ready()
            await asyncio.sleep(0)
            raise ValueError

        async def branch(ready: Ready) -> None:
            await Supervisor("branch", [Child("leaf", crashing)], intensity=Intensity(1, 1000.0)).run(ready)

        task = await start(Supervisor("root", [Child("branch", branch)], intensity=Intensity(2, 1000.0)))
        with pytest.raises(GaveUp, match="branch ended once too often"):
            await task
        assert len(starts) == 3 * 2

    run_async(main())


def test_a_child_that_swallows_its_cancel_is_found_out_and_the_others_are_stopped(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        release = asyncio.Event()

        def deaf(strategy_name: str) -> Run:
            async def run(ready: Ready) -> None:
                ready()
                while not release.is_set():
                    try:
                        await release.wait()
                    except asyncio.CancelledError:
                        world.note(f"{strategy_name} did not listen")

            return run

        async def branch(ready: Ready) -> None:
            await Supervisor("branch", [Child("deaf", deaf("deaf"), shutdown_s=0.05)]).run(ready)

        task = await start(Supervisor("root", [world.child("a"), Child("branch", branch), world.child("b")]))
        task.cancel()
        with pytest.raises(Stuck, match="branch: deaf still runs"):
            await task
        assert world.take() == ["+a", "+b", "-b", "deaf did not listen", "-a"]
        release.set()
        await asyncio.sleep(0)

    run_async(main())


def test_clean_up_is_not_interrupted_by_a_second_cancel(run_async: RunAsync) -> None:
    """The supervisor is stopped while it is stopping a child for a restart."""

    async def main() -> None:
        world = World()
        may_end = asyncio.Event()

        async def careful(ready: Ready) -> None:
            ready()
            try:
                await asyncio.Event().wait()
            finally:
                world.note("cleaning")
                await may_end.wait()
                world.note("clean")

        children = [world.child("a"), Child("careful", careful)]
        task = await start(Supervisor("s", children, strategy=Strategy.REST_FOR_ONE))
        world.ends["a"].set_exception(ValueError())
        await world.count("cleaning", 1)
        task.cancel()
        await asyncio.sleep(0.01)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.take() == ["+a", "-a", "cleaning", "clean"]

    run_async(main())


def test_two_children_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        Supervisor("s", [Child("a", World().child("a").run), Child("a", World().child("a").run)])


def test_a_child_is_added_restarted_and_retired(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        supervisor = Supervisor("s", [world.child("a")])
        task = await start(supervisor)
        assert await supervisor.add(world.child("b"))
        world.ends["b"].set_exception(RuntimeError("gone"))
        await world.count("+b", 2)
        retiring = asyncio.create_task(supervisor.retire("b", 60.0))
        await asyncio.sleep(0)
        world.ends["b"].set_result(None)
        await retiring
        await supervisor.add(world.child("c"))
        await supervisor.retire("c", 0.0)  # it does not end by itself
        await supervisor.add(world.child("b"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.take() == ["+a", "+b", "-b", "+b", "-b", "+c", "-c", "+b", "-b", "-a"]

    run_async(main())


def test_a_child_that_is_retiring_is_stopped_with_the_others(run_async: RunAsync) -> None:
    async def main() -> None:
        world = World()
        supervisor = Supervisor("s", [world.child("a"), world.child("b")])
        task = await start(supervisor)
        retiring = asyncio.create_task(supervisor.retire("a", 60.0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, retiring, return_exceptions=True)
        assert world.take() == ["+a", "+b", "-b", "-a"]

    run_async(main())


def test_a_child_that_is_added_and_does_not_start_is_forgotten(run_async: RunAsync) -> None:
    async def broken(ready: Ready) -> None:
        raise ValueError("not today")

    async def main() -> None:
        world = World()
        supervisor = Supervisor("s", [world.child("a")], intensity=Intensity(0, 1.0))
        task = await start(supervisor)
        assert not await supervisor.add(Child("b", broken))
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.take() == ["+a", "-a"]

    run_async(main())
