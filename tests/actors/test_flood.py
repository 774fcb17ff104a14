"""Entrypoint and balancer buried in data: what is asked of them is answered, and requests end as they should."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import structs

from bus.subjects import CANCEL, LOAD, ROUTE_DECODE, TOKENS, Address, ping
from kernels.timed import StepCost
from run.virtual import run_virtual
from schemas.liveness import Ping
from schemas.message import Role
from schemas.request import Cancel, Cancelled, Finished, FinishReason, TokensEmitted
from schemas.routing import Route
from tests.actors.builders import report, submit
from tests.actors.core import core, quiet

LIMIT = 1024
NUM_DATA = 2 * LIMIT
COST = StepCost(step_ns=10_000_000)
STALE = TokensEmitted(
    source="decode/d9", request_ids=["x"], epochs=[1], first_indexes=[0], counts=[1], tokens=[5], ends=[]
)
LOADED = structs.replace(report("d9"), is_accepting=False)


def test_a_flood_of_tokens_and_reports_keeps_out_no_ping_cancel_or_route() -> None:
    async def main() -> None:
        async with core(1, 1, COST) as system:
            for name in ("entrypoint/e0", "decode-balancer/db0"):
                system.actors[name].mailbox_limit = LIMIT  # type: ignore[misc]
            alone, _ = await system.finish(submit("r1", max_tokens=60))
            system.listener.reset("r1")
            await system.send(submit("r1", max_tokens=60))
            await system.send(submit("gone", max_tokens=900))
            await asyncio.sleep(0.1)
            bus = system.listener.bus

            async def behind_a_flood(address: Address[Any, Any], message: Any) -> Any:
                for _ in range(NUM_DATA):
                    await bus.tell(TOKENS.at("e0"), STALE)
                    await bus.tell(LOAD.at(Role.DECODE), LOADED)
                return await bus.ask(address, message, timeout_s=1)

            cancelled = await behind_a_flood(CANCEL.at("e0"), Cancel(request_id="gone"))
            routed = await behind_a_flood(ROUTE_DECODE.at("db0"), Route(request_id="r9", num_new=8))
            for role, id in ((Role.ENTRYPOINT, "e0"), (Role.DECODE_BALANCER, "db0")):
                assert (await behind_a_flood(ping(role).at(id), Ping())).id == id
                assert system.actors[f"{role}/{id}"].num_dropped > LIMIT
            assert cancelled.was_running and routed.replica == "d0"
            await system.listener.over("r1").wait()
            assert system.listener.tokens["r1"] == alone
            assert system.listener.ends == {"r1": Finished(reason=FinishReason.LENGTH), "gone": Cancelled()}
            system.actors["decode-balancer/db0"].ledger.release(routed.reservation, 0.0)  # type: ignore[attr-defined]
            assert await quiet(system) == {}

    run_virtual(main())
