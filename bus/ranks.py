"""A rank among those of its expert-parallel group: it calls them, is called by them, and moves experts when told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from bus.actor import Envelope, Handler
from bus.bus import Bus
from bus.pulse import Pulse
from bus.subjects import (
    BEGIN_DECODE,
    BEGIN_PREFILL,
    BROKEN,
    EXITED,
    EXPERTS,
    PLACE_DECODE,
    PLACE_PREFILL,
    STEP_DECODE,
    STEP_PREFILL,
    Address,
    Subject,
)
from schemas.experts import ExpertsUsed, GroupBroken, PlaceExperts, RankStarted, StepWanted
from schemas.liveness import ProcessExited
from schemas.message import Message, Role

log = logging.getLogger("shoal.group")
T = TypeVar("T")

REPEAT_S = 0.5
"""After which a rank that waits for others calls them again: the bus may lose a message."""

REPORT_STEPS = 16
"""Steps in a report of what experts were asked for."""

_STEP = {Role.PREFILL: STEP_PREFILL, Role.DECODE: STEP_DECODE}
_BEGIN = {Role.PREFILL: BEGIN_PREFILL, Role.DECODE: BEGIN_DECODE}
_PLACE = {Role.PREFILL: PLACE_PREFILL, Role.DECODE: PLACE_DECODE}


class Member(Protocol):
    """An engine's part in its group: see `kernels.engine.Member`."""

    rank: int
    size: int
    lives: tuple[int, ...]

    @property
    def generation(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def is_awake(self) -> bool: ...

    @property
    def is_broken(self) -> bool: ...

    @property
    def version(self) -> int: ...

    @property
    def places(self) -> list[npt.NDArray[np.int64]]: ...

    def take_used(self) -> list[npt.NDArray[np.int64]]: ...

    async def rearrange(self, version: int, places: Sequence[npt.NDArray[np.int64]]) -> None: ...


class Engine(Protocol):
    """What is needed of `kernels.engine.Engine`."""

    @property
    def group(self) -> Member | None: ...

    async def start(self) -> None: ...


@dataclass(frozen=True)
class GroupOf:
    """The ids of a group's ranks, in order, all of one role; `life` is that of the engine here (`Member.lives`), and
    `timeout_s` how long it waits for another one in a step."""

    ids: tuple[str, ...]
    life: int
    timeout_s: float = 0.0

    @property
    def name(self) -> str:
        """By its first rank."""
        return self.ids[0]


class GroupLost(Exception):
    """Another rank is gone. The actor ends, and its supervisor has it meet the others again."""


class Ranks:
    """One actor's view of its group, if it is in one. `spawn` is the actor's; `on_called` has it step soon.

    Its loop says by `turn` that it comes on: an engine that hangs ends the process (see pulse.py).
    While the group is asleep nothing runs: who gets work first calls the others.
    """

    def __init__(
        self,
        bus: Bus,
        role: Role,
        id: str,
        group: GroupOf | None,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        on_called: Callable[[], None],
    ) -> None:
        self._bus, self._role, self._id = bus, role, id
        self._group = group
        self._spawn, self._on_called = spawn, on_called
        self._member: Member | None = None
        self._num_called = self._num_begun = 0  # steps that others wait for, and that were begun here
        self._is_lost = False
        self._version = 0
        self._placing: asyncio.Task[Any] | None = None
        self._pulse = Pulse(f"{role}/{id}", 0.0 if group is None else group.timeout_s, spawn, bus.seams.die)

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        """To be among the actor's."""
        if self._group is None:
            return {}
        return {
            _STEP[self._role]: self._on_step_wanted,
            _BEGIN[self._role]: self._on_rank_started,
            _PLACE[self._role]: self._on_place,
        }

    def events(self, others: Mapping[Address[Any, Any], Handler]) -> Mapping[Address[Any, Any], Handler]:
        """The actor's: `others`, and here, too, the ends of processes."""
        if self._group is None:
            return others
        known = others.get(EXITED.all())

        async def on_exited(exited: ProcessExited, envelope: Envelope) -> None:
            if known is not None:
                await known(exited, envelope)
            await self._on_exited(exited, envelope)

        return {**others, EXITED.all(): on_exited}

    async def start(self, engine: Engine) -> None:
        """Start the engine, which meets the others: they are told meanwhile, as they may still count on the last one.

        Raises what the engine raises.
        """
        if self._group is None:
            await engine.start()
            return
        telling = self._spawn(self._repeat(_BEGIN[self._role], RankStarted(id=self._id, life=self._group.life)))
        try:
            await engine.start()
        finally:
            telling.cancel()
        self._member = engine.group

    async def turn(self, has_work: asyncio.Event) -> None:
        """Wait for work. The actor's loop is here once in each turn."""
        await self._pulse.turn(has_work)

    def judge(self, *, is_good: bool) -> None:
        """See `Pulse.judge`."""
        self._pulse.judge(is_good=is_good)

    def detail(self) -> dict[str, float]:
        """For load reports: turns of the loop so far, each with a step of the engine at most."""
        return {"steps": float(self._pulse.num_turns)}

    @property
    def generation(self) -> int:
        """Of the group; 0 without one."""
        return self._member.generation if self._member is not None else 0

    def is_called(self) -> bool:
        """Whether a step is to be done here even without work, as other ranks need it."""
        member = self._member
        if member is None:
            return False
        return member.is_awake or member.num_steps < max(self._num_called, self._num_begun)

    async def step(self, work: Awaitable[T]) -> T:
        """The result of a step of the engine, which waits for the others: if they are asleep they are called.

        When it fails because one of them is gone, everybody is told before the error goes on.
        """
        member = self._member
        if member is None:
            return await work
        calling = None
        if not member.is_awake and member.num_steps >= self._num_called:
            wanted = StepWanted(generation=member.generation, num_steps=member.num_steps)
            calling = self._spawn(self._repeat(_STEP[self._role], wanted))
        self._num_begun = member.num_steps + 1  # they come: it is done even if the work turns out to be none
        try:
            result = await work
        except RuntimeError as error:
            if member.is_broken:
                await self._tell_lost(str(error))
            raise
        finally:
            if calling is not None:
                calling.cancel()
        if member.num_steps % REPORT_STEPS == 0:
            await self._report(member)
        return result

    async def _repeat(self, subject: Subject[Any, None], message: Message) -> None:
        """Tell the others again and again, until cancelled."""
        assert self._group is not None
        while True:
            for id in self._group.ids:
                if id != self._id:
                    await self._bus.tell(subject.at(id), message)
            await asyncio.sleep(REPEAT_S)

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        """A process has ended: a group asleep would find out at its next step only that a rank was in it."""
        assert self._group is not None
        if self._member is not None and (
            gone := [id for id in exited.ids(self._role) if id in self._group.ids and id != self._id]
        ):
            reason = f"{self._role} {gone[0]} has ended"
            await self._tell_lost(reason)
            raise GroupLost(reason)

    async def _tell_lost(self, reason: str) -> None:
        """Once: the group is of no use any more."""
        assert self._group is not None
        if self._is_lost:
            return
        self._is_lost = True
        log.error("%s %s: group %s: %s", self._role, self._id, self._group.name, reason)
        event = GroupBroken(
            role=self._role,
            id=self._id,
            group=self._group.name,
            ranks=list(self._group.ids),
            reason=reason,
            generation=self.generation,
        )
        await self._bus.tell(BROKEN.at(self._role), event)

    async def _report(self, member: Member) -> None:
        assert self._group is not None
        report = ExpertsUsed(
            role=self._role,
            id=self._id,
            group=self._group.name,
            rank=member.rank,
            size=member.size,
            generation=member.generation,
            num_steps=member.num_steps,
            version=member.version,
            used=[counts.astype("<u4").tobytes() for counts in member.take_used()],
            places=[places.astype("<u2").tobytes() for places in member.places],
        )
        await self._bus.tell(EXPERTS.at(self._role), report)

    async def _on_step_wanted(self, wanted: StepWanted, envelope: Envelope) -> None:
        member = self._member
        if member is not None and wanted.generation == member.generation and wanted.num_steps >= member.num_steps:
            self._num_called = wanted.num_steps + 1
            self._on_called()

    async def _on_rank_started(self, started: RankStarted, envelope: Envelope) -> None:
        """Its earlier life has ended with all it held, and it waits for this one to end as well."""
        assert self._group is not None
        if self._member is None or started.id not in self._group.ids:
            return
        if started.life > self._member.lives[self._group.ids.index(started.id)]:
            reason = f"{self._role} {started.id} has ended, and starts anew"
            await self._tell_lost(reason)
            raise GroupLost(reason)

    async def _on_place(self, place: PlaceExperts, envelope: Envelope) -> None:
        """One at a time; who places experts says it again until all ranks have done it."""
        member = self._member
        if member is None or place.generation != member.generation:
            return
        if place.version > max(member.version, self._version):
            self._version = place.version
            if self._placing is not None:
                self._placing.cancel()
            self._placing = self._spawn(self._rearrange(member, place))

    async def _rearrange(self, member: Member, place: PlaceExperts) -> None:
        try:
            places = [np.frombuffer(one, "<u2").astype(np.int64).reshape(member.size, -1) for one in place.places]
            await member.rearrange(place.version, places)
        except ValueError as error:  # the others may have gone ahead: no plan after it would be carried out, either
            await self._tell_lost(f"experts cannot be placed: {error}")
            raise
