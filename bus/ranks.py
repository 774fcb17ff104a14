"""A rank among those of its expert-parallel group: it wakes them, is woken by them, and moves experts when told."""

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
from bus.subjects import (
    BROKEN,
    EXPERTS,
    PLACE_DECODE,
    PLACE_PREFILL,
    STEP_DECODE,
    STEP_PREFILL,
    Subject,
)
from schemas.experts import ExpertsUsed, GroupBroken, PlaceExperts, StepWanted
from schemas.message import Role

log = logging.getLogger("shoal.group")
T = TypeVar("T")

RING_S = 0.5
"""After which a rank that waits for others calls them again: the bus may lose a message."""

REPORT_STEPS = 16
"""Steps in a report of what experts were asked for."""

_STEP = {Role.PREFILL: STEP_PREFILL, Role.DECODE: STEP_DECODE}
_PLACE = {Role.PREFILL: PLACE_PREFILL, Role.DECODE: PLACE_DECODE}


class Member(Protocol):
    """An engine's part in its group: see `kernels.engine.Member`."""

    rank: int
    size: int
    generation: int

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

    async def rearrange(
        self, version: int, places: Sequence[npt.NDArray[np.int64]], ask_step: Callable[[], None]
    ) -> None: ...


@dataclass(frozen=True)
class GroupOf:
    """The ids of a group's ranks, in order, all of one role."""

    name: str
    ids: tuple[str, ...]


class Ranks:
    """One actor's view of its group, if it is in one. `spawn` is the actor's; `on_wanted` is called when it should
    step.

    While the group is asleep nothing runs: who gets work first calls the others.
    """

    def __init__(
        self,
        bus: Bus,
        role: Role,
        id: str,
        group: GroupOf | None,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        on_wanted: Callable[[], None],
    ) -> None:
        self._bus, self._role, self._id = bus, role, id
        self._group = group or GroupOf("", ())
        self._spawn, self._on_wanted = spawn, on_wanted
        self._member: Member | None = None
        self._num_wanted = 0
        self._placing: asyncio.Task[Any] | None = None

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        """To be among the actor's."""
        if not self._group.ids:
            return {}
        return {_STEP[self._role]: self._on_step_wanted, _PLACE[self._role]: self._on_place}

    def start(self, member: Member | None) -> None:
        """The engine has started, and met its group."""
        self._member = member

    def is_called(self) -> bool:
        """Whether other ranks need a step of this one."""
        member = self._member
        return member is not None and (member.is_awake or member.num_steps < self._num_wanted)

    async def step(self, work: Awaitable[T]) -> T:
        """The result of a step of the engine, which waits for the others: those who are asleep are called.

        When the step fails because one of them is gone, everybody is told before the error goes on.
        """
        member = self._member
        if member is None:
            return await work
        calling = None if member.is_awake else self._spawn(self._call(member))
        try:
            result = await work
        except RuntimeError as error:
            if member.is_broken:
                await self._broken(str(error))
            raise
        finally:
            if calling is not None:
                calling.cancel()
        if member.num_steps % REPORT_STEPS == 0:
            await self._report(member)
        return result

    async def _broken(self, reason: str) -> None:
        log.error("%s %s: group %s: %s", self._role, self._id, self._group.name, reason)
        event = GroupBroken(role=self._role, id=self._id, group=self._group.name, reason=reason)
        await self._bus.tell(BROKEN.at(self._role), event)

    async def _call(self, member: Member) -> None:
        wanted = StepWanted(generation=member.generation, num_steps=member.num_steps)
        while True:
            for id in self._group.ids:
                if id != self._id:
                    await self._bus.tell(_STEP[self._role].at(id), wanted)
            await asyncio.sleep(RING_S)

    async def _report(self, member: Member) -> None:
        used = [counts.astype("<u4").tobytes() for counts in member.take_used()]
        report = ExpertsUsed(
            role=self._role,
            id=self._id,
            group=self._group.name,
            rank=member.rank,
            size=member.size,
            generation=member.generation,
            num_steps=member.num_steps,
            version=member.version,
            used=used,
            places=[places.astype("<u2").tobytes() for places in member.places],
        )
        await self._bus.tell(EXPERTS.at(self._role), report)

    async def _on_step_wanted(self, wanted: StepWanted, envelope: Envelope) -> None:
        if self._member is not None and wanted.generation == self._member.generation:
            self._num_wanted = max(self._num_wanted, wanted.num_steps + 1)
            self._on_wanted()

    async def _on_place(self, place: PlaceExperts, envelope: Envelope) -> None:
        """Once at a time: who places experts says it again until all ranks have done it."""
        member = self._member
        if member is None or member.generation != place.generation or member.version >= place.version:
            return
        if self._placing is None or self._placing.done():
            places = [np.frombuffer(one, "<u2").astype(np.int64).reshape(member.size, -1) for one in place.places]
            self._placing = self._spawn(self._rearrange(member, place.version, places))

    async def _rearrange(self, member: Member, version: int, places: Sequence[npt.NDArray[np.int64]]) -> None:
        def ask_step() -> None:
            self._num_wanted = max(self._num_wanted, member.num_steps + 1)
            self._on_wanted()

        try:
            await member.rearrange(version, places, ask_step)
        except ValueError as error:
            log.error("%s %s: experts stay where they are: %s", self._role, self._id, error)
