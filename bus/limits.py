"""Asking the quota actors whether a request may be computed, and telling them what it used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from bus.bus import Bus, BusError, fail
from bus.insist import insist
from bus.subjects import ADMIT, USED
from schemas.failure import Code
from schemas.quota import AdmitCall, TokensUsed

ASK_TIMEOUT_S = 5.0
TRIES = 3
PATIENCE_S = 20.0
"""How long to wait for a quota actor: one restarts within this time, and a limit that nobody keeps is none."""

PAUSE_S = 0.1
_GONE = frozenset({Code.NO_RESPONDERS, Code.SHUTTING_DOWN})
_AGAIN = frozenset({Code.DEADLINE_EXCEEDED, Code.OVERLOADED})


class AnyQuota:
    """Whoever of the quota actors owns a tenant: `owner` says who of those not tried yet, or that there is nobody."""

    def __init__(self, bus: Bus, owner: Callable[[str, Collection[str]], str]) -> None:
        self._bus = bus
        self._owner = owner
        self._asked: dict[str, tuple[str, str]] = {}

    async def admit(self, call: AdmitCall, is_over: Callable[[], bool]) -> None:
        """Return once the request may be computed; tell `end` when it is over, whether it was let in or not.

        Raises BusError: rate_limited with `retry_after_s`, no_replica when nobody was there to say so for
        PATIENCE_S, cancelled once `is_over`. An answer that was lost is asked for again, and nothing charged twice.
        """
        loop = asyncio.get_running_loop()
        give_up_s, tried = loop.time() + PATIENCE_S, set[str]()
        while not is_over():
            if quota := self._owner(call.tenant, tried):
                self._asked[call.request_id] = (quota, call.tenant)
                try:
                    await self._bus.ask(ADMIT.at(quota), call, timeout_s=ASK_TIMEOUT_S)
                    return
                except BusError as error:
                    if error.code in _GONE:
                        tried.add(quota)
                    elif error.code not in _AGAIN:
                        self._asked.pop(call.request_id, None)  # unless it has ended meanwhile
                        raise
            else:
                tried.clear()
            if loop.time() >= give_up_s:
                raise fail(Code.NO_REPLICA, "no quota actor is there to say whether the tenant is within its limits")
            await asyncio.sleep(PAUSE_S)
        raise fail(Code.CANCELLED, "nobody waits for it any more")

    async def end(self, request_id: str, num_output_tokens: int) -> None:
        """A request is over. Told until it is heard, or who let it in is gone; nothing if it was never asked for."""
        quota, tenant = self._asked.pop(request_id, ("", ""))
        if quota:
            used = TokensUsed(tenant=tenant, request_id=request_id, num_output_tokens=num_output_tokens)
            await insist(self._bus, USED.at(quota), used, timeout_s=ASK_TIMEOUT_S, tries=TRIES)

    def is_asked(self, request_id: str) -> bool:
        """Whether there is something to tell when it ends."""
        return request_id in self._asked
