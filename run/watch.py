"""The root's own place on the bus: it pings every actor, has stuck processes killed, and tells of those that ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from bus.broker import NatsWire
from bus.bus import Bus, BusError
from bus.subjects import EXITED
from run.cluster import Member
from run.health import find_silent
from schemas.liveness import ProcessExited
from supervisors.liveness import Liveness
from supervisors.tasks import Ready

log = logging.getLogger("shoal.watch")

ROUND_S = 2.0
NUM_MISSED = 4
"""A process is found out after this many rounds without an answer: eight seconds, more than any step takes."""


class Watch:
    """A child of the root. Processes tell it through `watch` and `exited`; it calls `kill` with a stuck one's name.

    What happens while it is not connected is not lost: exits are told once it is.
    """

    def __init__(self, nats_url: str, kill: Callable[[str], None], *, round_s: float = ROUND_S) -> None:
        self.bus: Bus | None = None
        self._nats_url = nats_url
        self._kill = kill
        self._round_s = round_s
        self._liveness = Liveness(NUM_MISSED)
        self._exits: deque[ProcessExited] = deque()
        self._has_exits = asyncio.Event()

    def watch(self, process: str, members: list[str]) -> None:
        """A process is ready."""
        self._liveness.watch(process, members)

    def exited(self, exit: ProcessExited) -> None:
        """A process has ended."""
        self._liveness.forget(exit.name)
        if exit.members:
            self._exits.append(exit)
            self._has_exits.set()

    async def run(self, ready: Ready) -> None:
        """Live until cancelled."""
        wire = await NatsWire.connect(self._nats_url, name="shoal-up")
        bus = Bus(wire)
        try:
            await bus.open()
            self.bus = bus
            ready()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tell_exits(bus))
                group.create_task(self._ping(bus))
                await wire.wait_lost()
                raise ConnectionError("the connection to NATS has ended for good")
        finally:
            self.bus = None
            await bus.close()

    async def _tell_exits(self, bus: Bus) -> None:
        while True:
            await self._has_exits.wait()
            while self._exits:
                await bus.tell(EXITED.all(), self._exits[0])
                self._exits.popleft()  # only now: what could not be told is told on the next connection
            self._has_exits.clear()

    async def _ping(self, bus: Bus) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self._round_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            asked = {(process, Member.parse(text)): text for process, text in self._liveness.members()}
            silent = await find_silent(bus, [member for _, member in asked], timeout_s=self._round_s)
            if silent and not await _is_reachable(bus):
                self._liveness.void()
                continue
            missed = [(process, text) for (process, member), text in asked.items() if member in silent]
            for process in self._liveness.end_round(missed):
                log.error("%s makes no progress: no answer to %d pings in a row; killing it", process, NUM_MISSED)
                self._kill(process)


async def _is_reachable(bus: Bus) -> bool:
    try:
        await bus.wire.flush()
    except BusError:
        return False
    return True
