"""All writers that are heard of: who lives, how far their events are known, and whose which slab is."""

from __future__ import annotations

from collections.abc import Iterable

from actors.rules.feed import Feed
from actors.rules.owner import Members
from schemas.cache import BlocksDropped, BlocksStored
from schemas.routing import LoadReported

Event = BlocksStored | BlocksDropped

RETRY_S = 1.0
"""How long a writer that gave no dump is left alone."""


class Writers:
    """Which events to apply, and whom to ask for a dump. Times are seconds of the caller's clock.

    Call `asking` when a dump is asked for, then either `dumped`, once it is applied, or `failed`. A writer that is gone
    is forgotten, but for its slabs: their blocks can still be read.
    """

    def __init__(self) -> None:
        self._members = Members()
        self._feeds: dict[str, Feed[Event]] = {}
        self._busy: dict[str, float] = {}  # until when not to ask, inf while one is asked
        self._slabs: dict[int, str] = {}

    def heard(self, report: LoadReported, now_s: float) -> None:
        """A writer's load report; `detail["seq"]` is the number of its last event."""
        self._members.saw(report.id, report.incarnation, now_s)
        feed = self._feeds.setdefault(report.id, Feed())
        feed.heartbeat(report.incarnation, int(report.detail.get("seq", 0)))

    def exited(self, ids: Iterable[str]) -> None:
        """These are known to be gone."""
        for id in ids:
            self._members.forget(id)

    def alive(self, now_s: float) -> list[str]:
        """Those there, sorted."""
        alive = self._members.alive(now_s)
        for id in self._feeds.keys() - set(alive):
            del self._feeds[id]  # `_busy` stays: its dump may be on its way still, and two at once would be mixed up
        return alive

    def event(self, event: Event) -> list[Event]:
        """The events to apply now. Those of a writer not heard of yet will be in its dump."""
        feed = self._feeds.get(event.writer)
        return feed.event(event.incarnation, event.seq, event) if feed else []

    def lost(self, now_s: float) -> list[str]:
        """Those to ask for a dump now."""
        return [id for id in self.alive(now_s) if self._feeds[id].is_lost and self._busy.get(id, 0.0) <= now_s]

    def is_whole(self, now_s: float) -> bool:
        """Whether what is known of all of them is up to date."""
        return not any(self._feeds[id].is_lost for id in self.alive(now_s))

    def lose(self, ids: Iterable[str]) -> None:
        """What is known of these is not enough any more."""
        for id in ids:
            if id in self._feeds:
                self._feeds[id].lose()

    def asking(self, id: str) -> None:
        """A dump is asked for, now."""
        self._feeds[id].asking()
        self._busy[id] = float("inf")

    def dumped(self, id: str, incarnation: str, seq: int) -> list[Event]:
        """Its dump is applied: the events to apply on top."""
        feed = self._feeds.get(id)
        self._busy.pop(id, None)
        return feed.dumped(incarnation, seq) if feed else []

    def failed(self, id: str, now_s: float) -> None:
        """It gave no dump."""
        self._busy.pop(id, None)
        if id in self._feeds:
            self._busy[id] = now_s + RETRY_S

    def claim(self, id: str, slabs: Iterable[int]) -> None:
        """These slabs are this writer's, from now on."""
        for slab in slabs:
            self._slabs[slab] = id

    def settle(self, id: str, slabs: Iterable[int]) -> list[int]:
        """These are all slabs that this writer has. The numbers of them, and of those it had before."""
        known = [slab for slab, owner in self._slabs.items() if owner == id]
        for slab in known:
            del self._slabs[slab]
        self.claim(id, slabs)
        return sorted({*known, *slabs})

    def owner(self, slab: int) -> str | None:
        """The writer of a slab, if it is known."""
        return self._slabs.get(slab)
