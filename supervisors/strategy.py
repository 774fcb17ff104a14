"""Who is restarted after an exit, and when to give up: OTP's rules, without tasks or processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Strategy(StrEnum):
    """Which children share the fate of one that exited: none, those started after it, or all."""

    ONE_FOR_ONE = "one_for_one"
    REST_FOR_ONE = "rest_for_one"
    ONE_FOR_ALL = "one_for_all"


class Restart(StrEnum):
    """When a child is started again: always, after an abnormal exit only, or never."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


class Intensity(NamedTuple):
    """More than `num_restarts` restarts within `period_s` seconds are too many.

    Choose the burst first, then the period so that the sustained rate is tolerable. Levels multiply: keep the top
    small. `is_each`: of one child; else of all together, where what ends the one is likely to be the others' end, too.
    """

    num_restarts: int
    period_s: float
    is_each: bool = False


DEFAULT_INTENSITY = Intensity(3, 10.0)


class Plan(NamedTuple):
    """What to do after an exit: stop these in this order, then start those in that order."""

    stop: list[str]
    start: list[str]


class GaveUp(Exception):
    """The supervisor cannot keep `child` running; its own parent decides."""

    def __init__(self, child: str, why: str) -> None:
        super().__init__(f"{child} {why}")
        self.child = child


class Children:
    """The children of one supervisor in their start order, and which of them are alive.

    Tell it `started` for each start and `exited` for each exit that was not asked for; carry out the plan it returns,
    telling `stopped` and `started` as you go. A child that fails to start while a plan is carried out is an `exited`.
    """

    def __init__(self, restarts: Mapping[str, Restart], strategy: Strategy, intensity: Intensity) -> None:
        self._restarts = dict(restarts)
        self._strategy = strategy
        self._intensity = intensity
        self._alive: set[str] = set()
        self._times: dict[str, deque[float]] = {}

    @property
    def names(self) -> list[str]:
        """All known children in start order; temporary ones are forgotten once they are gone."""
        return list(self._restarts)

    @property
    def alive(self) -> list[str]:
        """Those that were started and have neither exited nor been stopped, in start order."""
        return [name for name in self._restarts if name in self._alive]

    def started(self, name: str) -> None:
        """The child runs now (or is starting)."""
        self._alive.add(name)

    def stopped(self, name: str) -> None:
        """The child was stopped on request."""
        self._alive.discard(name)
        if self._restarts.get(name) is Restart.TEMPORARY:
            del self._restarts[name]

    def add(self, name: str, restart: Restart) -> None:
        """One more, the last in start order; or from now on another restart for a known one."""
        self._restarts[name] = restart

    def exited(self, name: str, *, is_normal: bool, now_s: float) -> Plan:
        """What to do now that this child has ended by itself.

        As in OTP: a temporary child is forgotten, also when a sibling takes it down; a transient one that ended
        normally stays down until a sibling's exit restarts it with the others. Raises GaveUp past the intensity.
        """
        restart = self._restarts[name]
        affected = self._affected(name)
        self.stopped(name)
        if restart is Restart.TEMPORARY or (restart is Restart.TRANSIENT and is_normal):
            return Plan([], [])
        self._count(name, now_s)
        return Plan(
            stop=[other for other in reversed(affected) if other in self._alive],
            start=[other for other in affected if self._restarts[other] is not Restart.TEMPORARY],
        )

    def _affected(self, name: str) -> list[str]:
        names = self.names
        if self._strategy is Strategy.ONE_FOR_ONE:
            return [name]
        if self._strategy is Strategy.REST_FOR_ONE:
            return names[names.index(name) :]
        return names

    def _count(self, name: str, now_s: float) -> None:
        num_restarts, period_s, is_each = self._intensity
        times = self._times.setdefault(name if is_each else "", deque())
        times.append(now_s)
        while now_s - times[0] > period_s:
            times.popleft()
        if len(times) > num_restarts:
            raise GaveUp(name, f"ended once too often: more than {num_restarts} restarts within {period_s:g} s")
