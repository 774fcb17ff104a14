"""A courier: what is on its way, and when more may be sent."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.rules.outbox import Outbox
from bus.bus import Bus, OnFate
from bus.courier import Courier
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import TOKENS
from run.virtual import run_virtual

PACE_S = 0.002


class Answering(Bus):
    """Everybody takes what they are told after a while, but for e2, who is gone."""

    took_s = 0.0

    async def tell(self, address: Any, message: Any, *, on_fate: OnFate | None = None) -> None:
        assert on_fate is not None
        asyncio.get_running_loop().call_later(self.took_s, on_fate, "e2" not in address.name)


def test_a_receipt_counts_when_it_is_time_and_then_more_may_be_sent() -> None:
    async def main() -> None:
        loop, receipts, gone = asyncio.get_running_loop(), list[float](), list[str]()
        bus, outbox = Answering(MemoryWire(MemoryBroker())), Outbox("decode/d0")
        courier = Courier(bus, TOKENS, outbox, lambda: receipts.append(loop.time()), gone.append, PACE_S)
        for took_s in (0.0005, 0.005):
            started_s, bus.took_s = loop.time(), took_s
            outbox.add("e1", "r", 1, 0, [5])
            assert await courier.flush()
            outbox.add("e1", "r", 1, 1, [6])
            assert not await courier.flush(), "one batch is under way"
            await asyncio.sleep(0.01)
            assert [round(at_s - started_s, 6) for at_s in receipts] == [max(took_s, PACE_S)]
            assert await courier.flush()
            await asyncio.sleep(0.01)
            receipts.clear()
        outbox.add("e2", "r", 1, 0, [5])
        await courier.flush()
        await asyncio.sleep(0.01)
        assert (gone, receipts) == (["e2"], []) and outbox.may_send("e2", loop.time())

    run_virtual(main())
