"""What only the memory broker promises: nothing happens inside publish, one history per run, and a wire can be cut."""

from __future__ import annotations

import asyncio

import pytest

from bus.bus import Bus, BusError, Delivery
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import ping
from schemas.failure import Code
from schemas.liveness import Ping
from tests.conftest import Run


def test_nothing_is_delivered_inside_publish(run_async: Run) -> None:
    async def main() -> None:
        wire = MemoryWire(MemoryBroker())
        heard: list[Delivery] = []
        await wire.subscribe("x", heard.append)
        await wire.publish("x", b"")
        assert heard == []
        await wire.flush()
        assert len(heard) == 1

    run_async(main())


def test_the_same_calls_give_the_same_deliveries() -> None:
    async def main() -> list[tuple[int, str, bytes]]:
        broker = MemoryBroker()
        wires = [MemoryWire(broker) for _ in range(5)]
        history: list[tuple[int, str, bytes]] = []
        for i, wire in enumerate(wires):
            await wire.subscribe("work.*", lambda d, i=i: history.append((i, d.subject, d.body)), queue="q")
            await wire.subscribe("work.>", lambda d, i=i: history.append((i, d.subject, d.body)))
        for i in range(50):
            await wires[i % 5].publish(f"work.{i % 3}", b"%d" % i)
        await wires[0].flush()
        return history

    first, second = asyncio.run(main()), asyncio.run(main())
    assert first == second
    assert len(first) == 50 * 6


def test_members_of_a_queue_take_turns(run_async: Run) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        turns: list[int] = []
        for i in range(3):
            await MemoryWire(broker).subscribe("x", lambda d, i=i: turns.append(i), queue="q")
        source = MemoryWire(broker)
        for _ in range(6):
            await source.publish("x", b"")
        await source.flush()
        assert turns == [0, 1, 2, 0, 1, 2]

    run_async(main())


def test_a_cut_wire_vanishes_without_an_error(run_async: Run) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        dead, alive = Bus(MemoryWire(broker)), Bus(MemoryWire(broker))
        await dead.open()
        await alive.open()
        heard: list[Delivery] = []
        said: list[bytes] = []
        await dead.wire.subscribe("shoal.tester.dead.*", heard.append)
        await alive.wire.subscribe("said", lambda d: said.append(d.body))
        await dead.wire.publish("said", b"before")
        await alive.tell(ping("tester").at("dead"), Ping())
        assert isinstance(dead.wire, MemoryWire)
        dead.wire.cut()
        await dead.wire.publish("said", b"after")
        unsubscribe = await dead.wire.subscribe("shoal.tester.dead.*", heard.append)
        with pytest.raises(BusError) as caught:
            await alive.ask(ping("tester").at("dead"), Ping(), timeout_s=10)
        assert caught.value.code == Code.NO_RESPONDERS
        with pytest.raises(BusError) as caught:
            await dead.ask(ping("tester").at("dead"), Ping(), timeout_s=0.01)
        assert caught.value.code == Code.DEADLINE_EXCEEDED
        await unsubscribe()
        await dead.close()
        assert heard == []
        assert said == [b"before"]

    run_async(main())


def test_nothing_is_kept_of_listeners_that_left(run_async: Run) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        wire = MemoryWire(broker)
        unsubscribes = [await wire.subscribe(f"a.{i}.*.>", lambda d: None) for i in range(10)]
        for unsubscribe in unsubscribes:
            await unsubscribe()
        await wire.subscribe("b.c", lambda d: None)
        await wire.close()
        assert broker._root.children == {}

    run_async(main())
