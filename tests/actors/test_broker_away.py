"""The broker goes away for long, and comes back: nobody is gone for not having been heard of meanwhile (case 5)."""

from __future__ import annotations

import asyncio

import pytest

from actors.balancers.actor import Balancer
from bus.bus import Delivery
from bus.memory import MemoryWire
from kernels.timed import StepCost
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.request import Finished, FinishReason
from tests.actors.builders import submit
from tests.actors.core import core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
SLOW = StepCost(step_ns=20_000_000)
SETTLE_S = 3.0


class Leaving(RecordingBroker):
    """While it is away, what is said waits at who said it, as it does with NATS; or is lost."""

    def __init__(self, *, is_lossy: bool) -> None:
        self._is_lossy, self._is_back, self._before_s = is_lossy, True, 0.0
        self._since_s: float | None = None
        super().__init__()
        self._kept: list[tuple[MemoryWire, Delivery]] = []

    @property
    def away_s(self) -> float:
        if self._since_s is None:
            return self._before_s
        return self._before_s + asyncio.get_running_loop().time() - self._since_s

    @away_s.setter
    def away_s(self, away_s: float) -> None:
        self._before_s = away_s

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if self._is_back:
            super().publish(source, delivery)
        elif not self._is_lossy:
            self._kept.append((source, delivery))

    async def leave(self, for_s: float) -> None:
        """And the time that all take to come back behind it."""
        self._since_s, self._is_back = asyncio.get_running_loop().time(), False
        await asyncio.sleep(for_s)
        self._is_back = True
        kept, self._kept = self._kept, []
        for source, delivery in kept:
            super().publish(source, delivery)
        await asyncio.sleep(SETTLE_S)
        self._before_s, self._since_s = self.away_s, None


@pytest.mark.parametrize("is_lossy", [False, True])
@pytest.mark.parametrize("away_s", [8.0, 120.0])
def test_all_goes_on_where_it_was(away_s: float, is_lossy: bool) -> None:
    async def main() -> None:
        async with core(cost=SLOW) as alone:
            expected = await alone.finish(submit("r0", max_tokens=600))
        broker = Leaving(is_lossy=is_lossy)
        async with core(2, 2, SLOW, broker) as system:
            requests = [submit(f"r{i}", max_tokens=600) for i in range(8)]
            for request in requests:
                await system.send(request)
            await asyncio.sleep(1.0)
            replicas = [dict(a.ledger._replicas) for a in system.actors.values() if isinstance(a, Balancer)]
            assert [len(one) for one in replicas] == [2, 2]
            await broker.leave(away_s)
            still = [dict(a.ledger._replicas) for a in system.actors.values() if isinstance(a, Balancer)]
            assert still == replicas  # also: none begins anew, as one that is new
            peers = system.entrypoint._finder.peers
            assert peers._prefill.alive(system.entrypoint.now_s()) == ["p0", "p1"]
            for request in requests:
                await system.listener.over(request.request_id).wait()
                got = system.listener.tokens[request.request_id], system.listener.ends[request.request_id]
                assert got == expected
            assert system.entrypoint.shard.detail()["lost"] == 0
            assert await quiet(system) == {}

    run_virtual(main())
