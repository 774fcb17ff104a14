"""A rank among those of its expert-parallel group: it calls them, is called by them, and moves experts when told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from bus.actor import Envelope, Handler
from bus.bus import Bus
from bus.meeting import GroupOf, Meetings, repeat
from bus.meeting import Member as Meeting
from bus.pulse import Pulse
from bus.subjects import (
    EXITED,
    EXPERTS,
    PLACE_DECODE,
    PLACE_PREFILL,
    STEP_DECODE,
    STEP_PREFILL,
    Address,
    Subject,
)
from schemas.experts import ExpertsUsed, PlaceExperts, StepWanted
from schemas.liveness import ProcessExited
from schemas.message import Role

log = logging.getLogger("shoal.group")
T = TypeVar("T")

REPEAT_S = 0.5
"""After which a rank that waits for others calls them again: the bus may lose a message."""

REPORT_STEPS = 16
"""Steps in a report of what experts were asked for."""

EXITED_EARLY: Address[ProcessExited, None] = replace(EXITED, is_early=True).all()

_STEP = {Role.PREFILL: STEP_PREFILL, Role.DECODE: STEP_DECODE}
_PLACE = {Role.PREFILL: PLACE_PREFILL, Role.DECODE: PLACE_DECODE}


class Member(Meeting, Protocol):
    """An engine's part in its group: see `kernels.grouping.Member`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def is_awake(self) -> bool: ...

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


class Ranks:
    """One actor's view of its group, if it is in one. `spawn` is the actor's; `on_called` has it step soon.

    Its loop says by `turn` that it comes on: an engine that hangs ends the process (see pulse.py).
    While the group is asleep nothing runs: who gets work first calls the others. When a rank goes, or comes, those that
    are there meet anew (`meeting.py`) in the place of a step.
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
        self._version = 0
        self._placing: asyncio.Task[Any] | None = None
        self._meetings = None if group is None else Meetings(bus, role, id, group, spawn, on_called)
        self._pulse = Pulse(f"{role}/{id}", 0.0 if group is None else group.timeout_s, spawn, bus.seams.die)

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        """To be among the actor's."""
        if self._meetings is None:
            return {}
        own: dict[Subject[Any, Any], Handler] = {
            _STEP[self._role]: self._on_step_wanted,
            _PLACE[self._role]: self._on_place,
        }
        return {**own, **self._meetings.handlers()}

    def events(self, others: Mapping[Address[Any, Any], Handler]) -> Mapping[Address[Any, Any], Handler]:
        """The actor's: `others`, and the ends of processes, heard at once: later they could be taken for the ends of
        those that have been started instead."""
        meetings = self._meetings
        if meetings is None:
            return others

        async def on_exited(exited: ProcessExited, envelope: Envelope) -> None:
            meetings.exited(exited.ids(self._role))

        return {**others, EXITED_EARLY: on_exited}

    async def start(self, engine: Engine) -> None:
        """Start the engine, and meet the other ranks. Raises what the engine raises."""
        await engine.start()
        if self._meetings is not None and engine.group is not None:
            await self._meet(self._meetings, engine.group, "it starts")
            self._member = engine.group

    async def _meet(self, meetings: Meetings, member: Member, why: str) -> None:
        if self._placing is not None:
            self._placing.cancel()
        await meetings.gather(member, why)
        self._num_called = self._num_begun = self._version = 0

    async def turn(self, has_work: asyncio.Event) -> None:
        """Wait for work. The actor's loop is here once in each turn."""
        await self._pulse.turn(has_work)

    def judge(self, *, is_good: bool) -> None:
        """See `Pulse.judge`."""
        self._pulse.judge(is_good=is_good)

    def detail(self) -> dict[str, float]:
        """For load reports: turns of the loop so far, each with a step of the engine at most."""
        detail = {"steps": float(self._pulse.num_turns)}
        if self._meetings is not None and self._member is not None:
            size = 0 if self._member.is_broken else self._member.size  # nobody steps while they wait to meet
            detail |= {"group_size": float(size), "meetings": float(self._meetings.num_held)}
        return detail

    @property
    def generation(self) -> int:
        """Of the group that was met last, be it broken now; 0 without one."""
        return 0 if self._meetings is None else self._meetings.generation

    def is_called(self) -> bool:
        """Whether a step is to be done here even without work, as other ranks need it."""
        member, meetings = self._member, self._meetings
        if member is None or meetings is None:
            return False
        return meetings.is_due or member.is_awake or member.num_steps < max(self._num_called, self._num_begun)

    async def step(self, work: Awaitable[T]) -> T:
        """The result of a step of the engine, which waits for the others: if they are asleep they are called.

        When one of them is gone, or all have left to meet others, those that are there have met again before the error
        of the engine goes on. Raises GroupLost when too few are left.
        """
        member, meetings = self._member, self._meetings
        if member is None or meetings is None:
            return await work
        calling = None
        if not member.is_awake and member.num_steps >= self._num_called:
            wanted = StepWanted(generation=member.generation, num_steps=member.num_steps)
            calling = self._spawn(repeat(self._bus, _STEP[self._role], meetings.others, wanted, REPEAT_S))
        self._num_begun = member.num_steps + 1  # they come: it is done even if the work turns out to be none
        try:
            try:
                result = await work
            finally:
                if calling is not None:
                    calling.cancel()
        except RuntimeError as error:
            if member.is_broken:
                await self._meet(meetings, member, str(error))
            raise
        if member.num_steps % REPORT_STEPS == 0:
            await self._report(member)
        return result

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

    async def _on_place(self, place: PlaceExperts, envelope: Envelope) -> None:
        """One at a time; who places experts says it again until all ranks have done it."""
        member = self._member
        if member is None or member.is_broken or place.generation != member.generation:
            return  # of a group that is no more
        if place.version > max(member.version, self._version):
            self._version = place.version
            if self._placing is not None:
                self._placing.cancel()
            self._placing = self._spawn(self._rearrange(member, place))

    async def _rearrange(self, member: Member, place: PlaceExperts) -> None:
        try:
            places = [np.frombuffer(one, "<u2").astype(np.int64).reshape(member.size, -1) for one in place.places]
            await member.rearrange(place.version, places)
        except ValueError:  # the others may have gone ahead: no plan after it would be carried out, either
            log.error("%s %s: experts cannot be placed", self._role, self._id)
            raise
