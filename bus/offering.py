"""A request's state on its way to a decode replica: offered to one after the other, until one takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.place import place
from bus.subjects import HAND_OVER, RELEASE_DECODE, RESEND_DECODE, ROUTE_DECODE
from schemas.bulk import Handle
from schemas.handover import HandOver, Refused
from schemas.request import Resend
from schemas.routing import Route, Routed

OFFER_S = 30.0
PROBE_S = 2.0
"""A replica that has not answered an offer for so long is asked whether it still has it."""

ASK_S = 5.0

PATIENCE_S = 60.0
"""How long a computed request waits for room in decode."""

RESUMED_PATIENCE_S = 600.0
"""The same of one that has output already: it is to end early only by its deadline."""


class Offering:
    """The state of one request; `to_hand_over` makes the message that goes with it to one replica.

    A cancelled one goes on to the next answer, then stops: so no reservation and no offer is ever left behind.
    """

    def __init__(self, bus: Bus, bulk: Bulk, state: bytes, to_hand_over: Callable[[Routed, Handle], HandOver]) -> None:
        self._bus = bus
        self._bulk = bulk
        self._state = state
        self._to_hand_over = to_hand_over
        self._cancelled = asyncio.Event()
        self.is_taken = False
        """A replica has said that it owns the request."""

    @property
    def is_over(self) -> bool:
        """Cancelled, ended, or owned elsewhere."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop soon. Idempotent."""
        self._cancelled.set()

    async def place(self, wanted: Route, patience_s: float = PATIENCE_S) -> None:
        """Returns when a replica has taken it, or there is no need any more: cancelled, ended, or owned elsewhere.

        Raises the balancer's `BusError` when nobody had room for so long.
        """
        checksum = await self._bulk.checksum(self._state)
        await place(
            self._bus,
            ROUTE_DECODE,
            RELEASE_DECODE,
            wanted,
            lambda routed: self._offer(routed, checksum),
            patience_s=patience_s,
            is_over=self._cancelled.is_set,
        )

    async def _offer(self, routed: Routed, checksum: int) -> bool:
        """Offer the state to one decode replica. True if it took it, False if not or when cancelled meanwhile."""
        try:
            handle = self._bulk.offer(self._state, lease_s=OFFER_S, checksum=checksum)
        except BusError:
            return False  # too much is on offer already
        message = self._to_hand_over(routed, handle)
        asking = asyncio.create_task(self._bus.ask(HAND_OVER.at(routed.replica), message, timeout_s=OFFER_S))
        giving_up = asyncio.create_task(self._cancelled.wait())
        try:
            while not asking.done():
                both = [asking, giving_up]
                done, _ = await asyncio.wait(both, timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED)
                if giving_up in done or (not done and not await self._is_held(message, routed.replica)):
                    return False
            answer = asking.result()
        except BusError:
            return False
        finally:
            asking.cancel()
            giving_up.cancel()
            self._bulk.withdraw(handle)
        if isinstance(answer, Refused) and answer.is_final:
            self.cancel()  # it has ended, or is owned elsewhere
        self.is_taken = not isinstance(answer, Refused)
        return self.is_taken

    async def _is_held(self, message: HandOver, replica: str) -> bool:
        """Whether a decode replica still has our offer: one that was killed meanwhile cannot say so by itself."""
        asked = Resend(request_ids=[message.request_id], first_indexes=[message.num_output], epochs=[message.epoch])
        answer = await self._bus.ask(RESEND_DECODE.at(replica), asked, timeout_s=ASK_S)
        return not answer.ends
