"""One script, one history: run it, and see whether anything that must hold does not."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from run.simulate.chaos.call import Call
from run.simulate.chaos.checks import Checks, limit_wrongs
from run.simulate.chaos.clients import SOON_LIMITED, Clients
from run.simulate.chaos.excuses import is_excused
from run.simulate.chaos.loop import StandingLoop
from run.simulate.chaos.script import Ask, Fault, Script
from run.simulate.chaos.truth import answers
from run.simulate.chaos.world import ChaosWorld
from run.virtual import run_virtual
from schemas.request import Failed

WARM_S = 3.0
"""From the start: everyone has heard of everyone."""

TICK_S = 0.5
BOUND_S = 100.0
"""Every request ends so long after its deadline, or its arrival, or the last fault, whichever is last."""

BACK_S = 300.0
"""And everyone is back so long after the last fault."""

QUIET_S = 150.0
"""So long after the last end all is at its baseline: the longest lease, twice."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What must hold and did not: the kind, how, and when, in seconds after the system came up."""

    kind: str
    text: str
    at_s: float


class Broken(Exception):
    """The first violation: the history ends with it."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.text)
        self.violation = violation


@dataclass(slots=True)
class History:
    """`digest` of all messages with their times, of which there were `num_events`; how requests ended; how long it
    took, in virtual seconds."""

    digest: str = ""
    num_events: int = 0
    virtual_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    violation: Violation | None = None


class _Run:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._answers = answers(script.asks)
        self._checks = Checks(self._violate)
        self._began_s = 0.0
        self._broken: Violation | None = None
        self._is_over = asyncio.Event()

    async def run(self) -> History:
        history, loop = History(), asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        world = ChaosWorld(self._script, self._checks.releases.hear)
        self._began_s = loop.time() + WARM_S
        try:
            await self._live(world)
        except Broken as broken:
            history.violation = broken.violation
            cast(StandingLoop, loop).all_go_on()
        history.digest, history.num_events = world.chaos.history, world.chaos.num_messages
        history.virtual_s = loop.time()
        if (clients := world.actors.get("recipe/rc0")) is not None:
            history.ends.update(_end(call) for call in clients.calls.values())  # type: ignore[attr-defined]
        return history

    async def _live(self, world: ChaosWorld) -> None:
        await world.open()
        name = "recipe/rc0"
        clients = Clients("rc0", await world.bus(name), await world.bulk(name), self._violate)
        await world.add(clients)
        await self._until(world, clients, self._began_s)
        self._checks.start(world)
        events: list[Ask | Fault] = sorted([*self._script.asks, *self._script.faults], key=lambda event: event.at_s)
        for event in events:
            await self._until(world, clients, self._began_s + event.at_s)
            if isinstance(event, Ask):
                clients.spawn(clients.ask(event, self._answers[event.id], has_quota=self._script.shape.quota > 0))
                if event.cancel_s:
                    asyncio.get_running_loop().call_later(event.cancel_s, self._cancel, clients, event.id)
            else:
                world.begin_fault(event)
        await self._until(world, clients, self._began_s + self._script.calm_s)
        try:
            async with asyncio.timeout(BACK_S):
                await world.calm()
        except TimeoutError:
            self._violate("bound", f"{', '.join(world.away)} did not end, or did not come back")
        self._raise()
        while clients.open() or len(clients.calls) < len(self._script.asks):
            await self._until(world, clients, self._now_s + TICK_S)
        await self._settle(world, clients)

    def _cancel(self, clients: Clients, id: str) -> None:
        clients.spawn(clients.cancel(id))

    async def _settle(self, world: ChaosWorld, clients: Clients) -> None:
        """All have ended: wait until nothing is held any more."""
        end_s = self._now_s + QUIET_S
        while residue := self._checks.residue(world):
            if self._now_s > end_s:
                self._violate("baseline", ", ".join(f"{what} {number}" for what, number in residue.items()))
            await self._until(world, clients, self._now_s + 2 * TICK_S)
        self._checks.releases.check(world)
        for wrong in limit_wrongs(world, clients.num_admitted[SOON_LIMITED]):
            self._violate("limits", wrong)
        self._raise()

    async def _until(self, world: ChaosWorld, clients: Clients, end_s: float) -> None:
        """Let time pass, and look every now and then. Raises Broken."""
        while True:
            left_s = end_s - self._now_s
            if left_s > 0:
                await asyncio.sleep(min(left_s, TICK_S))
            self._check(world, clients)
            if left_s <= TICK_S:
                return

    def _check(self, world: ChaosWorld, clients: Clients) -> None:
        self._checks.check(world, self._now_s - self._began_s)
        for call in clients.calls.values():
            if call.end is None:
                due_s = max(call.begun_s + call.ask.deadline_s, self._began_s + self._script.calm_s) + BOUND_S
                if self._now_s > due_s:
                    self._violate("bound", f"{call.ask.id} has not ended")
            elif not call.is_judged:
                call.is_judged = True
                self._judge(call)
        self._raise()

    def _judge(self, call: Call) -> None:
        """Its end is one that it may have."""
        if isinstance(call.end, Failed):
            if not is_excused(call, self._script, self._began_s):
                self._violate("failures", f"{call.ask.id} failed for no reason: {call.end.failure}")
        elif call.is_cancelled:
            return
        elif call.end != call.answer.end or len(call.tokens) != len(call.answer.tokens):
            self._violate("ends", f"{call.ask.id}: {call.end} after {len(call.tokens)} of {len(call.answer.tokens)}")

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _violate(self, kind: str, text: str) -> None:
        """Noted; it ends the history at the next look."""
        if self._broken is None:
            self._broken = Violation(kind, text, round(self._now_s - self._began_s, 3))

    def _raise(self) -> None:
        if self._broken is not None:
            raise Broken(self._broken)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._violate("crash", f"{context.get('message')}: {context.get('exception')!r}")


def _end(call: Call) -> str:
    if isinstance(call.end, Failed):
        return str(call.end.failure.code)
    return type(call.end).__name__.lower()


def run(script: Script) -> History:
    """The history of a script: the same each time."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # trouble is wanted here
    try:
        return run_virtual(_Run(script).run(), StandingLoop)
    finally:
        logging.disable(disabled)
