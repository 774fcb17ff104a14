"""Room in decode: who gets it, who waits, and that it comes back. Real actors, under a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from actors.balancers.actor import DecodeBalancer
from actors.decode.actor import REPORT_S, Decode
from actors.entrypoint.request import MAX_PREEMPTIONS
from bus.bus import Delivery, decoder
from bus.memory import MemoryWire
from bus.place import PAUSE_S
from kernels.timed import StepCost
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.handover import Claim
from schemas.request import Cancelled, Finished, FinishReason
from tests.actors.builders import hand_over, submit
from tests.actors.core import Core, core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
SLOW = StepCost(step_ns=10_000_000)


class Watching(RecordingBroker):
    """Counts messages by role and verb, and notes who was claimed, in order. Loses those that `is_lost` says."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.claims: list[tuple[str, str]] = []  # request, replica
        self.claimed_s: dict[str, float] = {}
        self.is_lost: Callable[[str], bool] = lambda subject: False

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        parts = delivery.subject.split(".")
        self.counts[f"{parts[1]} {parts[-1]}"] += 1
        if parts[0] == "shoal" and parts[-1] == "claim":
            claim = decoder(Claim).decode(delivery.body)
            self.claims.append((claim.request_id, claim.replica))
            self.claimed_s[claim.request_id] = asyncio.get_running_loop().time()
        if not self.is_lost(delivery.subject):
            super().publish(source, delivery)


def decode(system: Core, id: str = "d0") -> Decode:
    actor = system.actors[f"decode/{id}"]
    assert isinstance(actor, Decode)
    return actor


async def until(is_so: Callable[[], bool]) -> float:
    """Virtual seconds until it is."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not is_so():
        await asyncio.sleep(0.001)
    return loop.time() - began_s


async def finish_in_order(system: Core, sizes: list[tuple[str, int]]) -> None:
    """Submit one after the other, and wait for all."""
    running = []
    for id, max_tokens in sizes:
        running.append(asyncio.create_task(system.finish(submit(id, num_tokens=100, max_tokens=max_tokens))))
        await asyncio.sleep(0.05)
    assert {end for _, end in await asyncio.gather(*running)} == {LENGTH}
    assert await quiet(system) == {}


def test_four_times_too_much_all_ends_in_order_and_nothing_is_taken_back() -> None:
    """Outputs are no longer than expected: nobody has to make way."""
    broker = Watching()

    async def main() -> None:
        async with core(0, 0, SLOW, broker) as system:
            for id in ("p0", "p1"):
                await system.with_prefill(id, SLOW, num_slots=16)
            await system.with_decode("d0", SLOW, num_slots=16, capacity_tokens=1152)
            await finish_in_order(system, [(f"r{i}", 250) for i in range(12)])

    run_virtual(main())
    assert sorted(broker.claims) == sorted((f"r{i}", "d0") for i in range(12))  # each one once
    times = [broker.claimed_s[f"r{i}"] for i in range(12)]
    late = [earlier - later for earlier, later in zip(times, times[1:], strict=False)]
    assert max(late) <= PAUSE_S  # who has room, too, may ask first
    assert times[-1] - times[0] > 3
    assert broker.counts["decode handover"] == 12


def test_who_needs_most_is_not_overtaken_for_ever() -> None:
    broker = Watching()

    async def main() -> None:
        async with core(0, 0, SLOW, broker) as system:
            await system.with_prefill("p0", SLOW, num_slots=16)
            await system.with_decode("d0", SLOW, num_slots=16, capacity_tokens=1024)
            before = [("a", 300), ("b", 200), ("whole", 800)]
            await finish_in_order(system, [*before, *((f"r{i}", 20 + 10 * i) for i in range(10))])

    run_virtual(main())
    assert [id for id, _ in broker.claims[:3]] == ["a", "b", "whole"]
    assert broker.counts["decode handover"] == 13


def test_a_calm_tenant_waits_for_one_free_slot_and_the_flood_gets_the_rest() -> None:
    broker = Watching()
    num_between: list[int] = []
    num_used: list[int] = []

    async def main() -> None:
        async with core(0, 0, SLOW, broker) as system:
            await system.with_prefill("p0", SLOW, num_slots=64, max_step_tokens=4096)
            for id in ("d0", "d1"):
                await system.with_decode(id, SLOW, num_slots=2)
            for i in range(40):
                await system.send(submit(f"f{i}", num_tokens=10, max_tokens=100 + i % 7 * 20, tenant="flood"))
            await until(lambda: len(broker.claims) == 8)
            for i in range(5):
                num_before = len(broker.claims)
                _, end = await system.finish(submit(f"c{i}", num_tokens=10, max_tokens=10, tenant="calm"))
                assert end == LENGTH
                claimed = [id for id, _ in broker.claims[num_before:]]
                num_between.append(claimed.index(f"c{i}"))
                for _ in range(20):
                    num_used.append(sum(len(decode(system, id).slots) for id in ("d0", "d1")))
                    await asyncio.sleep(0.01)
            assert len(broker.claims) < 35  # the flood waits still
            await until(lambda: len(system.listener.ends) == 45)
            assert set(system.listener.ends.values()) == {LENGTH}
            assert await quiet(system) == {}

    run_virtual(main())
    assert max(num_between) <= 1  # that was claimed while its prompt was computed
    assert sum(num_used) / len(num_used) > 3.25


def test_a_full_rank_gets_nothing_and_delays_nobody() -> None:
    broker = Watching()

    async def main() -> None:
        async with core(1, 0, SLOW, broker) as system:
            await system.with_decode("d0", SLOW, num_slots=16, capacity_tokens=1024)
            await system.send(submit("long", num_tokens=800, max_tokens=180))
            await until(lambda: len(broker.claims) == 1)
            await system.with_decode("d1", SLOW, num_slots=4, capacity_tokens=4096)  # by shares the fuller one, soon
            await finish_in_order(system, [(f"r{i}", 10) for i in range(8)])
            assert system.listener.ends["long"] == LENGTH

    run_virtual(main())
    assert broker.claims == [("long", "d0"), *((f"r{i}", "d1") for i in range(8))]
    assert broker.counts["decode handover"] == 9


def test_lengths_skewed_by_a_hundred_make_few_give_way() -> None:
    broker, chance = Watching(), random.Random(5)

    async def main() -> None:
        async with core(2, 0, SLOW, broker) as system:
            for i in range(3):
                await system.with_decode(f"d{i}", SLOW, num_slots=6, capacity_tokens=2048)
            await finish_in_order(system, [(f"r{i}", chance.choice((8, 30, 800))) for i in range(40)])

    run_virtual(main())
    claims = Counter(id for id, _ in broker.claims)
    assert claims.keys() == {f"r{i}" for i in range(40)} and max(claims.values()) <= 1 + MAX_PREEMPTIONS
    assert 40 < claims.total() < 50 and broker.counts["decode handover"] == claims.total()


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_refused_at_admission_prefill_keeps_nothing_but_the_state(is_cancelled: bool) -> None:
    broker = Watching()

    async def main() -> None:
        async with core(1, 0, SLOW, broker) as system:
            await system.with_decode("d0", SLOW, num_slots=1)
            broker.is_lost = lambda subject: subject == "shoal.decode.load"  # nobody hears that it is full
            strange = decode(system).slots.arrive(hand_over("strange"))
            assert strange is not None
            await system.send(submit("r1", num_tokens=300, max_tokens=5))
            await until(lambda: broker.counts["decode handover"] >= 1)
            await asyncio.sleep(0.5)
            held = system.held()
            assert held["prefill/p0"] == 1 and held["bulk of prefill/p0"] == 0  # its reservation
            assert system.actors["prefill/p0"]._engine._requests._requests == {}  # type: ignore[attr-defined]
            assert held["decode-balancer/db0"] == 0
            if is_cancelled:
                await system.cancel("r1")
            else:
                decode(system).slots.leave(strange, 0.0)
            assert await until(lambda: "r1" in system.listener.ends) < 1.0
            assert await quiet(system, 1.0) == ({"decode/d0": 1} if is_cancelled else {})
            assert system.listener.ends["r1"] == (Cancelled() if is_cancelled else LENGTH)

    run_virtual(main())


def test_cancelled_right_after_the_claim_slot_and_reservation_are_back_within_a_step() -> None:
    step_s = 1.0

    async def main() -> None:
        async with core(1, 0) as system:
            await system.with_decode("d0", StepCost(step_ns=int(step_s * 1e9)))
            await system.send(submit("r1", num_tokens=300, max_tokens=500))
            await until(lambda: bool(decode(system).slots.running()))
            cancelling = asyncio.create_task(system.cancel("r1"))
            assert await until(lambda: not any(system.held().values())) <= step_s
            await cancelling
            assert system.listener.tokens.get("r1", []) == []

    run_virtual(main())


def test_every_balancer_hears_of_comings_and_goings_soon_and_of_steps_not_at_all() -> None:
    broker = Watching()

    async def main() -> None:
        async with core(1, 1, SLOW, broker) as system:
            other = DecodeBalancer("other", await system.bus("decode-balancer/other"))
            await system.add(other)

            def num_known() -> int:
                (known,) = other.ledger.eligible([], asyncio.get_running_loop().time())
                return len(known.reported)

            for i in range(4):
                await system.send(submit(f"r{i}", num_tokens=10, max_tokens=900))
            await until(lambda: len(broker.claims) == 4)
            assert await until(lambda: num_known() == 4) <= REPORT_S
            before = broker.counts["decode load"]
            await asyncio.sleep(2.5)  # some 250 steps
            assert broker.counts["decode load"] - before <= 2
            await until(lambda: len(system.listener.ends) == 4)
            assert await until(lambda: num_known() == 0) <= 2 * REPORT_S

    run_virtual(main())
