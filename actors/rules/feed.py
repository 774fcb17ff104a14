"""Following a writer by the numbers of its events, over a bus that loses, doubles and reorders them."""

from __future__ import annotations

from typing import Generic, TypeVar

E = TypeVar("E")

MAX_WAITING = 1000
"""Events kept while a dump is on its way. Past them all are let go, and one more dump is asked for."""


class Feed(Generic[E]):
    """What of one writer's events may be applied now; `is_lost` when only a dump can tell what it has.

    Events are numbered from 1 within an incarnation; a dump is all that the writer has after its event `seq`. Ask for
    one whenever `is_lost`, and call `asking` just before. While lost, events wait. A writer may have had blocks before
    its first event, so it begins lost.
    """

    def __init__(self) -> None:
        self.is_lost = True
        self._incarnation, self._seq = "", 0
        self._waiting: dict[tuple[str, int], E] = {}
        self._latest = ("", 0)  # heard of since the last dump was asked for

    def event(self, incarnation: str, seq: int, event: E) -> list[E]:
        """The events to apply now: this one, or none."""
        if not self.is_lost:
            if incarnation == self._incarnation and seq <= self._seq:
                return []
            if (incarnation, seq) == (self._incarnation, self._seq + 1):
                self._seq = seq
                return [event]
        self.heartbeat(incarnation, seq)
        self._waiting[incarnation, seq] = event
        if len(self._waiting) > MAX_WAITING:
            self._waiting.clear()
        return []

    def heartbeat(self, incarnation: str, seq: int) -> None:
        """The writer says that `seq` was its last event: whether that one came."""
        if incarnation == self._latest[0]:
            seq = max(seq, self._latest[1])
        self._latest = (incarnation, seq)
        self.is_lost = self.is_lost or self._is_behind()

    def lose(self) -> None:
        """What is here of this writer is not enough any more, whatever its events say."""
        self.is_lost = True

    def asking(self) -> None:
        """A dump is asked for, now: it will cover all that was heard before."""
        self._waiting.clear()
        self._latest = ("", 0)

    def dumped(self, incarnation: str, seq: int) -> list[E]:
        """The dump that was asked for last is applied: the events to apply on top of it. It may be lost still."""
        events = []
        while (event := self._waiting.pop((incarnation, seq + 1), None)) is not None:
            events.append(event)
            seq += 1
        self._waiting.clear()
        self._incarnation, self._seq = incarnation, seq
        self.is_lost = self._is_behind()
        return events

    def _is_behind(self) -> bool:
        incarnation, seq = self._latest
        return incarnation != "" and (incarnation != self._incarnation or seq > self._seq)
