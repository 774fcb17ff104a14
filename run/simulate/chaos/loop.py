"""A virtual loop on which one actor can stand still while the others go on, as a stopped process does."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

from run.virtual import VirtualLoop

OWNER: ContextVar[object | None] = ContextVar("OWNER", default=None)
"""Whose a task or timer is: set it where an actor begins, and all that it starts inherits it."""


class StandingLoop(VirtualLoop):
    """What is due for an owner that stands waits until it goes on; its timers are then late."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[object | None, list[asyncio.Handle]] = {}

    def stand(self, owner: object) -> None:
        """Nothing of this owner runs from now on, but for what is under way in this very moment. Idempotent."""
        if owner in self._waiting:
            return
        timers = self._scheduled
        self._waiting[owner] = [timer for timer in timers if _owner(timer) is owner]
        self._scheduled = [timer for timer in timers if _owner(timer) is not owner]
        heapq.heapify(self._scheduled)

    def go_on(self, owner: object) -> None:
        """It runs again: what was due already, in order, and its timers when they are due, or late. Idempotent."""
        for handle in self._waiting.pop(owner, ()):
            if isinstance(handle, asyncio.TimerHandle):
                heapq.heappush(self._scheduled, handle)
            else:
                self._ready.append(handle)

    def all_go_on(self) -> None:
        """Nobody stands any more, so that all can end."""
        for owner in list(self._waiting):
            self.go_on(owner)

    def _call_soon(self, callback: Callable[..., Any], args: Any, context: Context | None) -> asyncio.Handle:
        handle: asyncio.Handle = super()._call_soon(callback, args, context)  # type: ignore[misc]
        if self._waiting and (waiting := self._waiting.get(_owner(handle))) is not None:
            self._ready.pop()
            waiting.append(handle)
        return handle


def _owner(handle: asyncio.Handle) -> object | None:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(OWNER)
