"""A virtual loop on which one actor can stand still while the others go on, as a stopped process does."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

from run.virtual import Handle, Timer, VirtualLoop

OWNER: ContextVar[object | None] = ContextVar("OWNER", default=None)
"""Whose a task or timer is: set it where an actor begins, and all that it starts inherits it."""


class StandingLoop(VirtualLoop):
    """What is due for an owner that stands waits until it goes on; its timers are then late."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[object | None, list[Handle | Timer]] = {}

    def stand(self, owner: object) -> None:
        """Nothing of this owner runs from now on, but for what is under way in this very moment. Idempotent."""
        if owner in self._waiting:
            return
        timers = self._scheduled
        self._waiting[owner] = [entry[2] for entry in sorted(timers) if _owner(entry[2]) is owner]
        self._scheduled = [entry for entry in timers if _owner(entry[2]) is not owner]
        heapq.heapify(self._scheduled)

    def go_on(self, owner: object) -> None:
        """It runs again: what was due already, in order, and its timers when they are due, or late. Idempotent."""
        for handle in self._waiting.pop(owner, ()):
            if isinstance(handle, Timer):
                self.schedule(handle)
            else:
                self._ready.append(handle)

    def all_go_on(self) -> None:
        """Nobody stands any more, so that all can end."""
        for owner in list(self._waiting):
            self.go_on(owner)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        """See `asyncio.loop.call_soon`."""
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        if self._waiting and (waiting := self._waiting.get(_owner(handle))) is not None:
            self._ready.pop()
            waiting.append(handle)
        return handle


def _owner(handle: Handle | Timer) -> object | None:
    return handle._context.get(OWNER)
