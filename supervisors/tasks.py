"""A supervisor whose children are coroutines: `run(ready)`, as every actor, process and supervisor has."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from supervisors.strategy import DEFAULT_INTENSITY, Children, GaveUp, Intensity, Restart, Strategy

log = logging.getLogger("shoal.supervisor")

Ready = Callable[[], None]
Run = Callable[[Ready], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Child:
    """One child. `run` makes the thing anew at each start, lives until cancelled, and calls `ready` once it is up.

    After a cancel it gets `shutdown_s` to end. Give a nested supervisor at least the sum of its children's.
    """

    name: str
    run: Run
    restart: Restart = Restart.PERMANENT
    shutdown_s: float = 5.0


class Stuck(Exception):
    """A child went on after it was cancelled. Nothing in the process can end it: whoever gets this ends the process."""


_Life = asyncio.Task[BaseException | None]
"""A child's whole life as a task: it returns what ended it."""


class _Exit(NamedTuple):
    name: str
    task: _Life
    error: BaseException | None


class Supervisor:
    """Starts children in order, each when the one before it is ready; restarts them by OTP's rules; stops in reverse.
    `together`: starts all at once, for children that are ready only when the others are there, and stops all at once.

    `run()` lives until it is cancelled. It raises GaveUp when a child fails its first start or ends too often, and
    Stuck when one cannot be stopped; in every case the other children are stopped first. Within a restart only the
    last child is not waited for, so that a slow start does not keep the supervisor from its other children.
    """

    def __init__(
        self,
        name: str,
        children: Sequence[Child],
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: Intensity = DEFAULT_INTENSITY,
        on_restart: Callable[[str, BaseException | None], None] | None = None,
        together: bool = False,
    ) -> None:
        self.name = name
        self._together = together
        self._children = {child.name: child for child in children}
        if len(self._children) != len(children):
            raise ValueError(f"supervisor {name}: two children have the same name")
        self._strategy = strategy
        self._intensity = intensity
        self._on_restart = on_restart
        self._tasks: dict[str, _Life] = {}
        self._cancelled: set[_Life] = set()
        self._family: Children
        self._exits: asyncio.Queue[_Exit]

    async def add(self, child: Child) -> bool:
        """One more child, now that all are up. False, and it is not started again, if it ends before it is ready."""
        self._children[child.name] = child
        self._family.add(child.name, Restart.TEMPORARY)
        self._family.started(child.name)
        if not await self._start(child.name, self._exits):
            return False
        self._family.add(child.name, child.restart)
        return True

    async def retire(self, name: str, patience_s: float) -> None:
        """A child that was told to end is not started again. Returns once it has ended; after the patience it is
        stopped."""
        self._family.add(name, Restart.TEMPORARY)
        task, child = self._tasks[name], self._children[name]
        await asyncio.wait((task,), timeout=patience_s)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=child.shutdown_s)

    async def run(self, ready: Ready) -> None:
        """See the class."""
        loop = asyncio.get_running_loop()
        restarts = {child.name: child.restart for child in self._children.values()}
        family = self._family = Children(restarts, self._strategy, self._intensity)
        exits = self._exits = asyncio.Queue[_Exit]()
        try:
            for names in self._at_once(family.names):
                for name in names:
                    family.started(name)
                if not await self._start_all(names, exits):
                    exit = await self._next_exit(exits)
                    raise GaveUp(exit.name, f"did not start: {exit.error!r}") from exit.error
            ready()
            while True:
                exit = await self._next_exit(exits)
                log.warning("%s: %s ended: %r", self.name, exit.name, exit.error)
                plan = family.exited(exit.name, is_normal=exit.error is None, now_s=loop.time())
                if self._on_restart is not None and exit.name in plan.start:
                    self._on_restart(exit.name, exit.error)
                for name in plan.stop:
                    await self._stop(name)
                    family.stopped(name)
                for name in plan.start:
                    family.started(name)
                    if not await self._start(name, exits, wait=name != plan.start[-1]):
                        break  # its exit is in the queue, and the plan for it covers those that follow
        finally:
            await self._stop_all()

    def _at_once(self, names: list[str]) -> list[list[str]]:
        return [names] if self._together else [[name] for name in names]

    async def _start_all(self, names: list[str], exits: asyncio.Queue[_Exit]) -> bool:
        """Wait until all are ready. False as soon as one has ended before: who waits for it is not waited for."""
        starting = [asyncio.create_task(self._start(name, exits)) for name in names]
        try:
            for started in asyncio.as_completed(starting):
                if not await started:
                    return False
            return True
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    async def _start(self, name: str, exits: asyncio.Queue[_Exit], *, wait: bool = True) -> bool:
        """Start a child; wait until it is ready. False if it ended before."""
        is_ready = asyncio.Event()
        task = asyncio.create_task(self._live(name, is_ready.set, exits), name=f"{self.name}/{name}")
        self._tasks[name] = task
        if not wait:
            return True
        waiting = asyncio.create_task(is_ready.wait(), name=f"{self.name}/{name} ready")
        try:
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return is_ready.is_set()

    async def _live(self, name: str, ready: Ready, exits: asyncio.Queue[_Exit]) -> BaseException | None:
        """A child's whole life. It never raises: the end is an event for the supervisor."""
        task = asyncio.current_task()
        assert task is not None
        error: BaseException | None = None
        try:
            await self._children[name].run(ready)
        except asyncio.CancelledError as cancelled:
            # Nobody asked for it: the child awaited something that was cancelled, or raised it. That is a crash, and
            # must not vanish the way a cancelled task does.
            error = cancelled
        except Exception as raised:
            log.debug("%s: %s", self.name, name, exc_info=raised)
            _let_go(raised)
            error = raised
        exits.put_nowait(_Exit(name, task, error))
        return error

    async def _next_exit(self, exits: asyncio.Queue[_Exit]) -> _Exit:
        """The next exit nobody asked for: those of tasks that were stopped meanwhile are stale."""
        while True:
            exit = await exits.get()
            if self._tasks.get(exit.name) is exit.task:
                del self._tasks[exit.name]
                if isinstance(exit.error, Stuck):
                    raise exit.error
                return exit

    async def _stop(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is None:
            return
        if task not in self._cancelled:  # a second cancel would interrupt its clean-up
            self._cancelled.add(task)
            task.cancel()
        shutdown_s = self._children[name].shutdown_s
        await asyncio.wait((task,), timeout=shutdown_s)
        del self._tasks[name]
        self._cancelled.discard(task)
        if not task.done():
            raise Stuck(f"{self.name}: {name} still runs {shutdown_s:g} s after it was cancelled")
        if isinstance(error := task.result(), Stuck):
            raise error

    async def _stop_all(self) -> None:
        """Stop everything, last child first. Goes on past a stuck child, then raises for it."""
        found: list[BaseException | None] = []
        for names in self._at_once(list(reversed(self._children))):
            found += await asyncio.gather(*map(self._stop, names), return_exceptions=True)
        for error in found:
            if error is not None:
                raise error


def _let_go(error: BaseException | None) -> None:
    """An error is kept until the next one, and its frames keep all that the child had, such as an engine's weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
