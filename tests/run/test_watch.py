"""What the root tells of processes that have ended."""

from __future__ import annotations

import asyncio

import pytest

from bus.bus import Bus, BusError, Delivery, decoder
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import EXITED
from run.watch import Watch
from schemas.liveness import ProcessExited
from tests.conftest import Run


def test_an_exit_that_could_not_be_told_is_told_on_the_next_connection(run_async: Run) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        heard: asyncio.Queue[Delivery] = asyncio.Queue()
        await MemoryWire(broker).subscribe(EXITED.all().name, heard.put_nowait)
        lost, good = Bus(MemoryWire(broker)), Bus(MemoryWire(broker))
        await lost.wire.close()
        watch = Watch("", lambda process: None)
        exits = [ProcessExited(name=name, pid=1, members=[f"decode/{name}"]) for name in ("d0", "d1")]
        watch.exited(exits[0])
        with pytest.raises(BusError):
            await watch._tell_exits(lost)
        telling = asyncio.create_task(watch._tell_exits(good))
        assert decoder(ProcessExited).decode((await heard.get()).body) == exits[0]
        watch.exited(ProcessExited(name="empty", pid=2, members=[]))
        watch.exited(exits[1])
        assert decoder(ProcessExited).decode((await heard.get()).body) == exits[1]
        assert heard.empty()
        telling.cancel()

    run_async(main())
