"""`shoal drain`, as far as it goes without processes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from bus.actor import Actor, Handler
from bus.bus import Bus
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import EXITED, Subject
from run.cluster import Member
from run.drain import _drain
from run.virtual import run_virtual
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported


class Busy(Actor):
    """Has a request that does not end, or none."""

    role = Role.DECODE
    num = 1

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {}

    def load(self) -> LoadReported:
        return structs.replace(super().load(), num_running=self.num)


@pytest.mark.parametrize(("num", "status", "said"), [(0, 0, "0 left"), (1, 1, "ended before it had left")])
def test_it_is_over_when_it_has_left_or_ended(num: int, status: int, said: str) -> None:
    async def main() -> None:
        broker, out = MemoryBroker(), io.StringIO()
        bus, ours = Bus(MemoryWire(broker)), Bus(MemoryWire(broker))
        await bus.open()
        await ours.open()
        actor, ready = Busy("d0", bus), asyncio.Event()
        actor.num = num
        running = asyncio.create_task(actor.run(ready.set))
        await ready.wait()
        draining = asyncio.create_task(_drain(ours, Member(Role.DECODE, "d0"), 60.0, Console(file=out)))
        await asyncio.sleep(5.0)
        exited = ProcessExited(name="other", pid=1, members=["decode/d1"])
        await bus.tell(EXITED.all(), exited)
        await asyncio.sleep(1.0)
        assert draining.done() == (num == 0)
        await bus.tell(EXITED.all(), ProcessExited(name="decode", pid=1, members=["decode/d0"]))
        assert await draining == status
        assert said in out.getvalue()
        assert asyncio.get_running_loop().time() < 10.0
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())
