"""A decode replica that leaves: others go on with its requests, and no client sees it. Real actors, a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from actors.decode.actor import Decode
from bus.actor import LAST_S
from bus.bus import Delivery
from bus.memory import MemoryWire
from kernels.engine import Sampling as EngineSampling
from kernels.timed import StepCost
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.request import Cancelled, Finished, FinishReason, Sampling, Submit
from supervisors.grace import AT_ONCE, MOVING_S, Fate
from tests.actors.builders import submit
from tests.actors.core import Core, core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
SLOW = StepCost(step_ns=10_000_000)
GRACE_S = 0.5


class Lossy(RecordingBroker):
    """Loses what `is_lost` says."""

    is_lost: Callable[[str], bool] = staticmethod(lambda subject: False)

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if not self.is_lost(delivery.subject):
            super().publish(source, delivery)


def decode(system: Core, id: str = "d0") -> Decode:
    actor = system.actors[f"decode/{id}"]
    assert isinstance(actor, Decode)
    return actor


def counts(system: Core, id: str = "d0") -> dict[Fate, int]:
    return decode(system, id)._leaving.grace.counts


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def alone(requests: list[Submit], **fields: int) -> dict[str, list[int]]:
    """What nobody disturbs."""
    async with core(1, 0, SLOW) as system:
        await system.with_decode("d0", SLOW, num_slots=64, **fields)
        return {one.request_id: (await system.finish(one))[0] for one in requests}


def test_a_replica_that_leaves_under_load_loses_nothing() -> None:
    async def main() -> None:
        requests = [
            submit(f"r{i}", 1 + 37 * i % 300, 80 + 7 * i % 50, sampling=Sampling(temperature=i % 2, top_p=1.0, seed=i))
            for i in range(24)
        ]
        expected = await alone(requests)
        async with core(2, 0, SLOW) as system:
            await system.with_decode("d0", SLOW, num_slots=32)
            running = [asyncio.create_task(system.finish(one)) for one in requests]
            await until(lambda: len(decode(system).slots.running()) == 24)
            await system.with_decode("d1", SLOW, num_slots=32)
            began_s = asyncio.get_running_loop().time()
            await decode(system).leave(0.3)
            assert asyncio.get_running_loop().time() - began_s < 0.3 + MOVING_S
            assert await asyncio.gather(*running) == [(expected[one.request_id], LENGTH) for one in requests]
            assert counts(system)[Fate.MOVED] > AT_ONCE and not counts(system)[Fate.GIVEN_BACK]
            detail = decode(system).load().detail
            assert 0 < detail["pause_ms_p50"] <= detail["pause_ms_p99"] < 1000
            assert await quiet(system) == {}

    run_virtual(main())
