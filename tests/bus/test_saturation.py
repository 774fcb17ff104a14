"""An actor buried in data still answers a ping, a cancel and a route, and hears the answers it waits for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from bus.actor import RESERVE, Actor, Envelope, Handler
from bus.bus import Bus, Delivery
from bus.subjects import CANCEL, ROUTE_DECODE, TOKENS, Subject, ping
from schemas.liveness import Ping
from schemas.message import Role
from schemas.request import Cancel, CancelAcknowledged, TokensEmitted
from schemas.routing import Route, Routed
from tests.bus.conformance import TIMEOUT_S
from tests.bus.conftest import Net
from tests.conftest import Run

NUM_DATA = 5000
LIMIT = 64
DATA = TokensEmitted(
    source="decode/d0", request_ids=["r"], epochs=[1], first_indexes=[0], counts=[1], tokens=[5], ends=[]
)
PEER = ROUTE_DECODE.at("peer")


class Buried(Actor):
    """Cannot go on with its data before a peer has answered."""

    role = Role.ENTRYPOINT
    mailbox_limit = LIMIT

    def __init__(self, id: str, bus: Bus) -> None:
        super().__init__(id, bus)
        self.routed: Routed | None = None
        self.num_handled = 0

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {TOKENS: self._on_tokens, CANCEL: self._on_cancel}

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> None:
        if self.routed is None:
            self.routed = await self.bus.ask(PEER, Route(request_id="r", num_new=1), timeout_s=TIMEOUT_S)
        self.num_handled += 1

    async def _on_cancel(self, cancel: Cancel, envelope: Envelope) -> CancelAcknowledged:
        return CancelAcknowledged(request_id=cancel.request_id, was_running=True)


def test_data_fills_no_mailbox_and_no_connection_for_control(net: Net, run_async: Run) -> None:
    async def main() -> None:
        async with net.buses(2) as (bus, client), asyncio.timeout(TIMEOUT_S):
            routes: list[Delivery] = []
            await client.wire.subscribe(PEER.name, routes.append)
            await client.wire.flush()
            actor, ready = Buried("e0", bus), asyncio.Event()
            running = asyncio.create_task(actor.run(ready.set))
            await ready.wait()
            await client.tell(TOKENS.at("e0"), DATA)
            while not routes:
                await asyncio.sleep(0.001)
            for _ in range(NUM_DATA - 1):
                await client.tell(TOKENS.at("e0"), DATA)
            num_kept = 1 + LIMIT - LIMIT // RESERVE  # in its hand, and in the mailbox
            while actor.num_dropped + num_kept < NUM_DATA:
                await asyncio.sleep(0.001)
            pinging = asyncio.create_task(client.ask(ping("entrypoint").at("e0"), Ping(), timeout_s=TIMEOUT_S))
            cancelling = asyncio.create_task(
                client.ask(CANCEL.at("e0"), Cancel(request_id="r"), timeout_s=TIMEOUT_S)
            )
            while len(actor._mailbox) < num_kept + 1:
                await asyncio.sleep(0.001)
            await client.answer(routes[0].reply, Routed(replica="d0", reservation=1, balancer="db0"))
            pong, acknowledged = await pinging, await cancelling
            assert pong.id == "e0" and acknowledged.was_running
            assert actor.num_handled == num_kept and actor.num_dropped == NUM_DATA - num_kept
            running.cancel()
            await asyncio.wait([running])

    run_async(main())
