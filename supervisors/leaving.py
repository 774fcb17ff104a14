"""A replica's requests on their way to others of its role, when its grace is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import structs

from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.offering import Offering
from bus.subjects import RESEND
from schemas.bulk import Handle
from schemas.handover import HandOver
from schemas.request import Resend
from schemas.routing import Route, Routed
from supervisors.grace import Fate, Grace, Stage

log = logging.getLogger("shoal.leaving")

PATIENCE_S = 2.0
"""How long a request looks for a replica with room: computing it anew from cached blocks takes little longer. Once one
found nobody, those after it look, and do not wait. One that can hardly be computed anew looks for as long as it can."""

ASK_S = 2.0
PAUSE_S = 0.01


class Leaving:
    """One decode actor's. `spawn` is the actor's; `on_turn` has it ask `turn` soon, between two steps."""

    def __init__(
        self, bus: Bus, bulk: Bulk, spawn: Callable[[Coroutine[Any, Any, Any]], Any], on_turn: Callable[[], None]
    ) -> None:
        self.grace = Grace()
        self._bus, self._bulk = bus, bulk
        self._spawn, self._on_turn = spawn, on_turn
        self._offerings: dict[str, Offering] = {}
        self._is_cancelled: set[str] = set()
        self._patience_s = PATIENCE_S

    def drain(self, grace_s: float) -> None:
        """The grace begins."""
        self.grace.drain(self._now_s(), grace_s)
        self._spawn(self._tick(grace_s))

    def turn(self, running: Sequence[str]) -> list[str]:
        """Those whose turn it is. Each is to be taken out of the batch, and given to `move`."""
        return self.grace.freeze(running, self._now_s())

    def is_late(self) -> bool:
        """Nothing is offered any more."""
        return not self.grace.left_s(self._now_s())

    def is_gone(self, num_held: int) -> bool:
        """The replica has left, with nothing held."""
        return self.grace.stage(num_held, self._now_s()) is Stage.GONE

    def cancel(self, request_id: str) -> None:
        """It has ended: whoever it is offered to need not take it. Idempotent."""
        if request_id in self._offerings:
            self._is_cancelled.add(request_id)
            self._offerings[request_id].cancel()

    def detail(self) -> dict[str, float]:
        """For a load report: what became of those that were frozen, and how long the moved ones stood still."""
        counts, pauses = self.grace.counts, sorted(self.grace.pauses_s)
        detail = {"moved": float(counts[Fate.MOVED]), "given_back": float(counts[Fate.GIVEN_BACK])}
        for share in (50, 99) if pauses else ():
            detail[f"pause_ms_p{share}"] = round(1e3 * pauses[(len(pauses) - 1) * share // 100], 2)
        return detail

    async def move(self, last: HandOver, state: bytes) -> Fate:
        """Have another replica go on with a request that was frozen. `last` goes with its `state`, but for where that
        is and whose it becomes; its `epoch` is the present owner's. Without a state it is given back.

        Unless it was MOVED, the entrypoint is to be told that it has it again: where that is not so, it knows better.
        """
        offering = Offering(self._bus, self._bulk, state, lambda to, handle: _hand_over(last, to, handle))
        self._offerings[last.request_id] = offering
        fate = Fate.GIVEN_BACK
        try:
            if state and await self._is_known(last, offering):
                left_s = self.grace.left_s(self._now_s())
                patience_s = left_s if last.is_protected else min(self._patience_s, left_s)
                await offering.place(_route(last), patience_s)
                fate = Fate.MOVED if offering.is_taken else fate
        except BusError as error:
            self._patience_s = 0.0
            log.info("nobody takes %s: %s", last.request_id, error)
        if fate is not Fate.MOVED and last.request_id in self._is_cancelled:
            fate = Fate.ENDED
        del self._offerings[last.request_id]
        self._is_cancelled.discard(last.request_id)
        self.grace.settle(last.request_id, fate, self._now_s())
        log.info("%s is %s, at output token %d", last.request_id, fate, last.num_output)
        return fate

    async def _is_known(self, last: HandOver, offering: Offering) -> bool:
        """Wait until its entrypoint has all of its output: what it misses then, the new owner could not tell. False: it
        has ended, or there is no time."""
        asked = Resend(request_ids=[last.request_id], first_indexes=[last.num_output - 1], epochs=[last.epoch])
        while last.num_output:
            answer = await self._bus.ask(RESEND.at(last.entrypoint), asked, timeout_s=ASK_S)
            if answer.ends or answer.epochs != [last.epoch] or offering.is_over:
                return False
            if answer.tokens:
                break
            await asyncio.sleep(PAUSE_S)
        return not offering.is_over

    async def _tick(self, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        self._on_turn()
        await asyncio.sleep(self.grace.left_s(self._now_s()))
        for offering in self._offerings.values():
            offering.cancel()
        self._on_turn()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _hand_over(last: HandOver, to: Routed, handle: Handle) -> HandOver:
    return structs.replace(last, reservation=to.reservation, balancer=to.balancer, state=handle)


def _route(last: HandOver) -> Route:
    return Route(
        request_id=last.request_id,
        num_new=last.limits.max_tokens - last.num_output,
        num_cached=last.num_tokens,
        deadline_ns=last.limits.deadline_ns,
        tenant=last.tenant,
        is_whole=last.is_protected,
    )
