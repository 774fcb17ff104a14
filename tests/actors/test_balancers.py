"""Balancers in a running system: killed, many, without reports, among replicas that die or fill up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.balancers.actor import PrefillBalancer
from actors.prefill.actor import Prefill
from actors.rules.owner import EXPIRY_S
from bus.subjects import RELEASE_PREFILL, ROUTE_PREFILL, report_load
from kernels.timed import StepCost
from run.virtual import run_virtual
from schemas.message import Role
from schemas.request import Finished, FinishReason, Submit
from schemas.routing import Release, ReportLoad, Route, Routed
from tests.actors.builders import submit
from tests.actors.core import Core, core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
COST = StepCost(step_ns=5_000_000, prefill_token_ns=100_000)


async def with_balancer(system: Core, id: str) -> PrefillBalancer:
    balancer = PrefillBalancer(id, await system.bus(f"prefill-balancer/{id}"))
    await system.add(balancer)
    return balancer


def balancer_of(system: Core, id: str = "pb0") -> PrefillBalancer:
    balancer = system.actors[f"prefill-balancer/{id}"]
    assert isinstance(balancer, PrefillBalancer)
    return balancer


def computed(system: Core) -> dict[str, float]:
    """Tokens that each prefill replica has computed."""
    prefills = [actor for actor in system.actors.values() if isinstance(actor, Prefill)]
    return {one.id: one.load().detail["computed_tokens"] for one in prefills}


def freeze(system: Core) -> dict[str, Any]:
    """From now on no prefill replica's report reaches anyone. What thaws them."""
    told = {}
    for actor in system.actors.values():
        if isinstance(actor, Prefill):
            told[actor.id] = actor.report_load

            async def say_nothing() -> None:
                """Its report is lost."""

            actor.report_load = say_nothing  # type: ignore[method-assign]
    return told


def thaw(system: Core, told: dict[str, Any]) -> None:
    for id, report_load_ in told.items():
        system.actors[f"prefill/{id}"].report_load = report_load_  # type: ignore[method-assign]


async def all_finish(system: Core, requests: list[Submit], gap_s: float = 0.0) -> None:
    for request in requests:
        await system.send(request)
        await asyncio.sleep(gap_s)
    for request in requests:
        await asyncio.wait_for(system.listener.over(request.request_id).wait(), 120)
        assert system.listener.ends[request.request_id] == LENGTH


def requests(num: int, name: str = "r") -> list[Submit]:
    return [submit(f"{name}{i}", num_tokens=20 + 137 * i % 700, max_tokens=2) for i in range(num)]


@asynccontextmanager
async def pool(num_prefill: int, num_balancers: int = 1) -> AsyncIterator[Core]:
    async with core(num_prefill, 4, COST) as system:
        for number in range(1, num_balancers):
            await with_balancer(system, f"pb{number}")
        await asyncio.sleep(0.1)
        yield system
        assert await quiet(system) == {}


def test_case_3_a_replica_killed_between_route_and_dispatch_is_routed_around() -> None:
    async def main() -> None:
        async with pool(2) as system:
            balancer, choose = balancer_of(system), balancer_of(system)._choice
            chosen: list[str] = []

            def choose_and_kill(*about: Any) -> Any:
                replica = choose(*about)
                chosen.append(replica.id)
                if len(chosen) == 1:
                    system.kill(f"prefill/{replica.id}")  # no one is told
                return replica

            balancer._choice = choose_and_kill  # type: ignore[assignment]
            await all_finish(system, requests(1))
            assert len(chosen) == 2 and chosen[0] != chosen[1]
            await all_finish(system, requests(8, "after"))
            assert set(chosen[2:]) == {chosen[1]}  # nobody else ran into it while its last report was fresh

    run_virtual(main())


def test_a_killed_balancer_is_passed_over_and_a_new_one_needs_nothing_but_reports() -> None:
    async def main() -> None:
        async with pool(2, num_balancers=2) as system:
            system.kill("prefill-balancer/pb0")
            await all_finish(system, requests(4, "one"))
            long = submit("long", num_tokens=990, max_tokens=2)
            await system.send(long)
            await asyncio.sleep(0.02)
            system.kill("prefill-balancer/pb1")
            for request in requests(4):
                await system.send(request)
            await asyncio.sleep(0.05)
            reborn = await with_balancer(system, "pb2")
            await asyncio.sleep(0.001)
            known = reborn.ledger.eligible([], reborn.now_s())
            assert [one.num_requests for one in known] in ([0, 1], [1, 0])  # the long one, which it never routed
            for request in [long, *requests(4)]:
                await asyncio.wait_for(system.listener.over(request.request_id).wait(), 60)
                assert system.listener.ends[request.request_id] == LENGTH
            await all_finish(system, requests(4, "after"))

    run_virtual(main())


def test_case_7_a_burst_from_four_entrypoints_at_four_balancers() -> None:
    async def main() -> None:
        async with pool(4, num_balancers=4) as system:
            clients = [await system.bus(f"client/{number}") for number in range(4)]
            wanted = [Route(request_id=f"{i}", num_new=20 + 137 * i % 700, tenant=f"t{i % 3}") for i in range(400)]

            async def ask(number: int, route: Route) -> Routed:
                return await clients[number % 4].ask(ROUTE_PREFILL.any(), route, timeout_s=5)

            answers = await asyncio.gather(*(ask(number, route) for number, route in enumerate(wanted)))
            reserved: Counter[str] = Counter()
            for number in range(4):
                for id, one in balancer_of(system, f"pb{number}").ledger._replicas.items():
                    reserved[id] += sum(int(held.ns) for held in one.reserved.values())
            assert len({one.balancer for one in answers}) == 4 and len(reserved) == 4
            assert max(reserved.values()) / (sum(reserved.values()) / 4) < 1.2
            for answer in answers:
                release = Release(reservation=answer.reservation)
                await clients[0].tell(RELEASE_PREFILL.at(answer.balancer), release)

    run_virtual(main())


@pytest.mark.parametrize("num_balancers", [1, 4])
def test_case_38_frozen_reports_do_not_stop_the_pool_nor_unbalance_it(num_balancers: int) -> None:
    async def main() -> None:
        async with pool(4, num_balancers) as system:
            await all_finish(system, requests(20), gap_s=0.02)
            told = freeze(system)
            await asyncio.sleep(EXPIRY_S + 0.1)
            before = computed(system)
            await all_finish(system, requests(240, "frozen"), gap_s=0.013)  # about 80 % of what four can do
            done = [after - before[id] for id, after in computed(system).items()]
            assert max(done) / (sum(done) / len(done)) < 1.25
            degraded = [balancer_of(system, f"pb{n}").load().detail["degraded"] for n in range(num_balancers)]
            assert sum(degraded) >= 240 and min(degraded) > 0
            thaw(system, told)
            await asyncio.sleep(3.0)
            await all_finish(system, requests(40, "thawed"), gap_s=0.013)
            assert sum(degraded) == sum(
                balancer_of(system, f"pb{n}").load().detail["degraded"] for n in range(num_balancers)
            )

    run_virtual(main())


def test_case_26_storms_of_reports_and_flapping_lose_no_reservation() -> None:
    async def main() -> None:
        async with pool(2) as system:
            balancer = balancer_of(system)
            for request in requests(12):
                await system.send(request)
            await asyncio.sleep(0.01)
            for number in range(10):
                held = balancer.ledger.num_reserved
                for actor in (system.actors["prefill/p0"], system.actors["prefill/p1"]):
                    actor.is_draining = bool(number % 2)
                    for _ in range(5):
                        await system.listener.bus.tell(report_load(Role.PREFILL).all(), ReportLoad())
                await asyncio.sleep(0.001)
                there = sum(len(a.load().reservations) for a in system.actors.values() if isinstance(a, Prefill))
                assert there <= balancer.ledger.num_reserved <= held
            for request in requests(12):
                await asyncio.wait_for(system.listener.over(request.request_id).wait(), 60)
                assert system.listener.ends[request.request_id] == LENGTH

    run_virtual(main())
