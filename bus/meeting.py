"""How the ranks of an expert-parallel group come together, again and again: those that are there (design §6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bus.actor import Envelope, Handler
from bus.bus import Bus
from bus.muster import Muster, News
from bus.subjects import BROKEN, MEET_DECODE, MEET_PREFILL, PRESENT_DECODE, PRESENT_PREFILL, Subject
from bus.waiting import wait
from schemas.experts import GroupBroken, MeetRanks, RankPresent
from schemas.message import Message, Role

log = logging.getLogger("shoal.group")

PRESENT_S = 0.25
"""Between two words of a rank that waits to meet the others, and of one that calls them to a meeting."""

INVITE_S = 2.0
"""Between two words of a group that is not whole to the ranks that are not in it."""

GROW_S = 1.0
"""Between word of a rank that comes back and the meeting with it: there may be others, and all go on meanwhile."""

MOST_GROW_S = 60.0
"""It doubles with each meeting that fails, up to this: all stand still in those."""

LOOK_S = 0.1

_PRESENT = {Role.PREFILL: PRESENT_PREFILL, Role.DECODE: PRESENT_DECODE}
_MEET = {Role.PREFILL: MEET_PREFILL, Role.DECODE: MEET_DECODE}


class Member(Protocol):
    """What is needed of `kernels.grouping.Member` for meetings."""

    @property
    def is_broken(self) -> bool: ...

    def listen(self) -> str: ...

    async def meet(self, generation: int, rank: int, size: int, address: str) -> None: ...

    def call_off(self) -> None: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class GroupOf:
    """The ids of a group's ranks, in order, all of one role; `life` grows from each start of this one to its next, and
    `timeout_s` is how long it waits for another one in a step. Fewer than `least` ranks do not meet."""

    ids: tuple[str, ...]
    life: int
    timeout_s: float = 0.0
    least: int = 1

    @property
    def name(self) -> str:
        """By its first rank."""
        return self.ids[0]


class GroupLost(Exception):
    """Too few of the other ranks are left. The actor ends, and its supervisor has it meet the others again."""


async def repeat(
    bus: Bus, subject: Subject[Any, None], ids: Iterable[str], message: Message, every_s: float
) -> None:
    """Tell all of these again and again, until cancelled: the bus may lose a message."""
    while True:
        for id in ids:
            await bus.tell(subject.at(id), message)
        await asyncio.sleep(every_s)


class Meetings:
    """Of one rank, an actor's. It hears of others at any time, and then `is_due` may say that they are to meet anew:
    the actor's next step fails, and behind that it comes to `gather`."""

    def __init__(
        self,
        bus: Bus,
        role: Role,
        id: str,
        group: GroupOf,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        on_called: Callable[[], None],
    ) -> None:
        self.is_due = False
        self.num_held = 0
        self._bus, self._role, self._id, self._group = bus, role, id, group
        self._spawn, self._on_called = spawn, on_called
        self._muster = Muster(group.ids, id, group.life, group.least)
        self._member: Member | None = None
        self._call: MeetRanks | None = None
        self._has_heard = asyncio.Event()
        self._inviting: asyncio.Task[Any] | None = None
        self._growing: asyncio.Task[Any] | None = None
        self._grow_s = GROW_S
        self._all = [one for one in group.ids if one != id]

    @property
    def others(self) -> list[str]:
        """With whom this rank has met."""
        return [id for id in self._muster.members if id != self._id]

    @property
    def generation(self) -> int:
        """That of the last meeting to which all came: an engine's may be of one that fails."""
        return self._muster.generation

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        """To be among the actor's."""
        return {_PRESENT[self._role]: self._on_present, _MEET[self._role]: self._on_meet}

    async def gather(self, member: Member, why: str) -> None:
        """Meet those that are there. Raises GroupLost when they are too few for long, and what the engine raises."""
        self._member, muster = member, self._muster
        muster.wait(self._now_s())
        level = logging.WARNING if self.num_held else logging.INFO
        log.log(level, "%s %s waits to meet the ranks of its group: %s", self._role, self._id, why)
        for task in (self._inviting, self._growing):
            if task is not None:
                task.cancel()
        self._inviting = self._growing = None
        telling = self._spawn(repeat(self._bus, _PRESENT[self._role], self._all, muster.present, PRESENT_S))
        grow_s, self._grow_s = self._grow_s, GROW_S
        try:
            while not await self._meet(member, call := await self._next_call(member)):
                muster.failed(call, self._now_s())
                self._grow_s = min(2 * grow_s, MOST_GROW_S)
        finally:
            telling.cancel()
        muster.met(call)
        self._call = None
        self.num_held += 1
        self.is_due = False
        without = f", without {', '.join(muster.missing)}" if muster.missing else ""
        log.log(level, "%s %s is in a group of %s%s", self._role, self._id, ", ".join(call.ids), without)
        if muster.is_first and muster.missing:
            invitation = repeat(self._bus, _PRESENT[self._role], muster.missing, muster.present, INVITE_S)
            self._inviting = self._spawn(invitation)

    async def _next_call(self, member: Member) -> MeetRanks:
        """To a meeting that this rank is to come to: of another one, or its own when it leads."""
        while True:
            self._has_heard.clear()
            if self._call is not None:
                call, self._call = self._call, None
                return call
            now_s = self._now_s()
            if ids := self._muster.convene(now_s):
                address = member.listen() if len(ids) > 1 else ""
                return self._muster.call(ids, now_s, self._bus.seams.clock_ns(), address)
            if self._muster.is_hopeless(now_s):
                await self._tell_lost([self._id], reason := "too few ranks are left")
                raise GroupLost(f"{self._role} {self._id}: {reason}")
            await wait(self._has_heard, LOOK_S)

    async def _meet(self, member: Member, call: MeetRanks) -> bool:
        """Whether all have come. Who leads calls them until then."""
        calling = None
        if call.ids[0] == self._id:
            await self._tell_lost(self._muster.lost(call), "the others have met without it")
            calling = self._spawn(repeat(self._bus, _MEET[self._role], call.ids[1:], call, PRESENT_S))
        try:
            await member.meet(call.generation, call.ids.index(self._id), len(call.ids), call.address)
        except RuntimeError as error:
            if not member.is_broken:
                raise
            log.warning("%s %s: no meeting of %s: %s", self._role, self._id, ", ".join(call.ids), error)
            return False
        finally:
            if calling is not None:
                calling.cancel()
        return True

    async def _tell_lost(self, ids: list[str], reason: str) -> None:
        """What these held has to be computed anew: one that stands still would not say so itself."""
        if ids:
            event = GroupBroken(
                role=self._role,
                id=self._id,
                group=self._group.name,
                ranks=ids,
                reason=reason,
                generation=self._muster.generation,
            )
            await self._bus.tell(BROKEN.at(self._role), event)

    def exited(self, ids: Iterable[str]) -> None:
        """Their processes have ended: a group asleep would find out at its next step only. The first meeting waits for
        those that start anew."""
        for id in ids if self.num_held else ():
            if self._muster.lose(id):
                self._break()
        self._has_heard.set()

    async def _on_present(self, present: RankPresent, envelope: Envelope) -> None:
        news = self._muster.hear(present, self._now_s())
        self._has_heard.set()
        if news is News.BROKEN:
            self._break()
        elif news is News.GROWS and self._growing is None:
            self._growing = self._spawn(self._grow())

    async def _grow(self) -> None:
        await asyncio.sleep(self._grow_s)
        assert self._member is not None  # it leads a group
        self._member.call_off()
        self.is_due = True
        self._on_called()

    def _break(self) -> None:
        """The group is of no use any more: its next exchange here fails, and its next step."""
        assert self._member is not None  # it has met the others
        self._member.abandon()
        self.is_due = True
        self._on_called()

    async def _on_meet(self, call: MeetRanks, envelope: Envelope) -> None:
        if self._muster.accepts(call):
            self._call = call
            self._has_heard.set()

    def _now_s(self) -> float:
        """Time in which others can be heard of."""
        return asyncio.get_running_loop().time() - self._bus.wire.away_s
