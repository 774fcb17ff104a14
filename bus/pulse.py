"""Whether the loop that drives an engine comes on, and to something: a thread that hangs in a step leaves its actor's
mailbox alone, and an engine that fails at everything goes on taking requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("shoal.pulse")

TICK_S = 1.0
STALL_S = 60.0
"""No turn takes so long: a step has at most some hundred tokens of prompts, or one for each request."""

FIRST_STALL_S = 600.0
NUM_FIRST = 8
"""The first turns of a life compile what they run."""


MAX_FAILED = 3
"""Steps in a row that came to nothing for anybody: it is not the requests, each of which is in one of them only."""


class Sick(Exception):
    """An engine fails at everything. The actor ends, and its supervisor starts it anew, with another engine."""


class Pulse:
    """Progress is a turn of the loop, or that there is nothing to do.

    `patience_s` is what a turn may wait for others, beside its own work. A process whose loop does not come on is of no
    use, and cannot be helped from inside: the thread that hangs goes on holding what it holds. So it is ended, by
    `die`, and its supervisor starts it anew.
    """

    def __init__(
        self,
        name: str,
        patience_s: float,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        die: Callable[[], None],
    ) -> None:
        self.num_turns = self._num_failed = 0
        self._name, self._patience_s, self._spawn, self._die = name, patience_s, spawn, die
        self._is_working = asyncio.Event()
        self._watching: asyncio.Task[Any] | None = None

    async def turn(self, has_work: asyncio.Event) -> None:
        """The loop is here once in each turn: one has ended, and the next begins when there is work."""
        self._is_working.clear()
        if not has_work.is_set():
            await has_work.wait()
        self._is_working.set()
        self.num_turns += 1
        if self._watching is None:
            self._watching = self._spawn(self._watch())

    def judge(self, *, is_good: bool) -> None:
        """What a step of the engine came to: something for one of its requests, at least. Raises Sick."""
        self._num_failed = 0 if is_good else self._num_failed + 1
        if self._num_failed >= MAX_FAILED:
            raise Sick(f"{self._name}: {MAX_FAILED} steps in a row came to nothing")

    async def _watch(self) -> None:
        """Counts ticks, not seconds, so that a pause of the whole process (SIGSTOP, a suspended laptop) is not held
        against it."""
        seen = num_ticks = 0
        while True:
            await self._is_working.wait()
            await asyncio.sleep(TICK_S)
            if not self._is_working.is_set() or self.num_turns != seen:
                seen, num_ticks = self.num_turns, 0
                continue
            num_ticks += 1
            limit_s = self._patience_s + (FIRST_STALL_S if seen <= NUM_FIRST else STALL_S)
            if num_ticks * TICK_S >= limit_s:
                log.critical("%s: no progress for %g s, in turn %d; ending the process", self._name, limit_s, seen)
                self._die()
                return
