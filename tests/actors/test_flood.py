"""Entrypoint and balancer buried in data: what is asked of them is answered, and requests end as they should."""

from __future__ import annotations

import asyncio

from msgspec import structs

from bus.subjects import LOAD, ROUTE_DECODE, TOKENS, ping
from kernels.timed import StepCost
from run.virtual import run_virtual
from schemas.liveness import Ping
from schemas.message import Role
from schemas.request import Cancelled, Finished, FinishReason, TokensEmitted
from schemas.routing import Route
from tests.actors.builders import report, submit
from tests.actors.core import core, quiet

NUM_DATA = 8500  # more than a mailbox takes
COST = StepCost(step_ns=10_000_000)


def test_a_flood_of_tokens_and_reports_keeps_out_no_ping_cancel_or_route() -> None:
    async def main() -> None:
        async with core(1, 1, COST) as system:
            alone, _ = await system.finish(submit("r1", max_tokens=60))
            system.listener.reset("r1")
            await system.send(submit("r1", max_tokens=60))
            await system.send(submit("gone", max_tokens=900))
            await asyncio.sleep(0.1)
            stale = TokensEmitted(
                source="decode/d9", request_ids=["x"], epochs=[1], first_indexes=[0], counts=[1], tokens=[5], ends=[]
            )
            loads = structs.replace(report("d9"), is_accepting=False)
            bus = system.listener.bus
            for _ in range(NUM_DATA):
                await bus.tell(TOKENS.at("e0"), stale)
                await bus.tell(LOAD.at(Role.DECODE), loads)
            routed = bus.ask(ROUTE_DECODE.at("db0"), Route(request_id="r9", num_new=8), timeout_s=1)
            pongs = (
                bus.ask(ping(Role.ENTRYPOINT).at("e0"), Ping(), timeout_s=1),
                bus.ask(ping(Role.DECODE_BALANCER).at("db0"), Ping(), timeout_s=1),
            )
            acknowledged, answer, *_ = await asyncio.gather(system.cancel("gone"), routed, *pongs)
            assert acknowledged.was_running and answer.replica == "d0"
            flooded = [system.actors[name].num_dropped for name in ("entrypoint/e0", "decode-balancer/db0")]
            assert min(flooded) > 0
            await system.listener.over("r1").wait()
            assert system.listener.tokens["r1"] == alone
            assert system.listener.ends == {"r1": Finished(reason=FinishReason.LENGTH), "gone": Cancelled()}
            system.actors["decode-balancer/db0"].ledger.release(answer.reservation, 0.0)  # type: ignore[attr-defined]
            assert await quiet(system) == {}

    run_virtual(main())
