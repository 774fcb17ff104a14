"""An event loop whose clock jumps to the next timer: hours in milliseconds, and the same every time.

A history is hundreds of thousands of turns of the loop, so it has its own, without what a virtual clock has no use for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_RESOLUTION_S = 1e-9
"""Timers that are due so soon are due now."""

_MOST_CANCELLED = 100
"""Timers that were cancelled and are still kept; and never more than half of all."""


class _Clock:
    """In the place of a selector: nothing to wait for but time, which passes at once."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def close(self) -> None:
        """There is nothing to let go of."""


class Handle(asyncio.Handle):
    """One without a debug mode."""

    __slots__ = ()
    _context: Context
    _callback: Callable[..., Any]
    _args: tuple[Any, ...]

    def __init__(self, callback: Callable[..., Any], args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class Timer(asyncio.TimerHandle):
    """As above."""

    __slots__ = ()
    _context: Context
    _callback: Callable[..., Any]
    _args: tuple[Any, ...]
    _scheduled: bool

    def __init__(
        self, when: float, callback: Callable[..., Any], args: Any, loop: VirtualLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True


class VirtualLoop(asyncio.BaseEventLoop):
    """No threads and no sockets: what needs one raises RuntimeError. `time()` starts at 0 seconds. Timers that are due
    at the same time come in the order in which they were set. There is no debug mode."""

    _ready: deque[Handle | Timer]
    _scheduled: list[tuple[float, int, Timer]]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Clock()
        self._numbers = itertools.count()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._selector.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        """See `asyncio.loop.call_soon`."""
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Timer:
        """See `asyncio.loop.call_later`."""
        return self.call_at(self._selector.now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Timer:
        """See `asyncio.loop.call_at`."""
        timer = Timer(float(when), callback, args, self, context)  # numpy's would go on into messages
        self.schedule(timer)
        return timer

    def schedule(self, timer: Timer) -> None:
        """It is due at its time, behind those of the same time that are there."""
        heapq.heappush(self._scheduled, (timer.when(), next(self._numbers), timer))

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("no threads under the virtual clock")

    def _write_to_self(self) -> None:
        raise RuntimeError("no threads under the virtual clock")

    def _run_once(self) -> None:
        """One turn: all that is ready, and what time it is if nothing is."""
        ready, clock = self._ready, self._selector
        timers = self._scheduled
        if self._timer_cancelled_count > _MOST_CANCELLED and self._timer_cancelled_count > len(timers) // 2:
            timers = self._forget_cancelled()
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._timer_cancelled_count -= 1
        if not ready and not self._stopping:
            if not timers:
                raise RuntimeError("every task waits, and no timer is set: nothing can ever happen again")
            if timers[0][0] > clock.now_s:
                clock.now_s += timers[0][0] - clock.now_s
        end_s = clock.now_s + _RESOLUTION_S
        while timers and timers[0][0] < end_s:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                message = f"Exception in callback {handle!r}"
                self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _forget_cancelled(self) -> list[tuple[float, int, Timer]]:
        self._scheduled = [entry for entry in self._scheduled if not entry[2]._cancelled]
        heapq.heapify(self._scheduled)
        self._timer_cancelled_count = 0
        return self._scheduled


def run_virtual(work: Coroutine[Any, Any, T], make_loop: Callable[[], VirtualLoop] = VirtualLoop) -> T:
    """Run a coroutine to its end under a virtual clock of its own."""
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(work)
