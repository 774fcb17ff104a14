"""Sending what was gathered, with receipts: the moving part between an outbox and the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from bus.bus import Bus, OnFate
from bus.subjects import Subject
from schemas.message import Message

M = TypeVar("M", bound=Message)


class Outbox(Protocol[M]):
    """What decides, purely, what may go out now: see actors/rules/outbox.py."""

    def take(self, now_s: float) -> list[tuple[str, M]]:
        """(destination, message) to send now."""
        ...

    def taken(self, destination: str, now_s: float) -> None:
        """A receipt came."""
        ...

    def drop(self, destination: str) -> None:
        """The destination is gone."""
        ...


class Courier(Generic[M]):
    """Carries the messages of one outbox to the actors of one role.

    `on_receipt` is called when more may be sent, `on_gone` with a destination where nobody listens any more; what
    waits for it is dropped then. Have one task call `flush`: two would mix up the order. A receipt counts no sooner
    than `pace_s` after its message went out.
    """

    def __init__(
        self,
        bus: Bus,
        subject: Subject[M, Any],
        outbox: Outbox[M],
        on_receipt: Callable[[], None],
        on_gone: Callable[[str], None],
        pace_s: float = 0.0,
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._outbox = outbox
        self._on_receipt = on_receipt
        self._on_gone = on_gone
        self._pace_s = pace_s
        self._fates: dict[str, OnFate] = {}
        self._sent_s: dict[str, float] = {}

    async def flush(self) -> bool:
        """Send what may go out now. Whether anything was."""
        now_s = asyncio.get_running_loop().time()
        messages = self._outbox.take(now_s)
        for destination, message in messages:
            self._sent_s[destination] = now_s
            await self._bus.tell(self._subject.at(destination), message, on_fate=self._fate(destination))
        return bool(messages)

    def _fate(self, destination: str) -> OnFate:
        if destination not in self._fates:

            def on_fate(was_taken: bool) -> None:
                if was_taken:
                    self._taken(destination)
                else:
                    self._fates.pop(destination, None)
                    self._sent_s.pop(destination, None)
                    self._outbox.drop(destination)
                    self._on_gone(destination)

            self._fates[destination] = on_fate
        return self._fates[destination]

    def _taken(self, destination: str) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._sent_s.get(destination, 0.0) + self._pace_s
        if loop.time() < due_s:
            loop.call_at(due_s, self._taken, destination)
            return
        self._outbox.taken(destination, loop.time())
        self._on_receipt()
