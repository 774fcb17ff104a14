"""The quota actor: lets requests of the tenants it owns in, or says when to come again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from actors.quota.quota import Ledger
from actors.rules.tenants import Tenants
from bus.actor import Actor, Envelope, Handler
from bus.bus import Bus, BusError
from bus.subjects import ADMIT, USED, Subject
from schemas.failure import Code, Failure
from schemas.message import Role
from schemas.quota import AdmitCall, Admitted, TokensUsed
from schemas.request import Taken
from schemas.routing import LoadReported


class Quota(Actor):
    """Keeps the limits of `tenants`: of each, those asked of it. What was used is forgotten with it."""

    role = Role.QUOTA

    def __init__(self, id: str, bus: Bus, tenants: Tenants) -> None:
        super().__init__(id, bus)
        self._tenants = tenants
        self._ledger = Ledger(tenants, 0)

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {ADMIT: self._on_admit, USED: self._on_used}

    async def on_start(self) -> None:
        self._ledger = Ledger(self._tenants, self._now_ns())

    @property
    def is_drained(self) -> bool:
        return True  # what it counts goes with it

    def load(self) -> LoadReported:
        return structs.replace(super().load(), num_running=len(self._ledger))

    async def _on_admit(self, call: AdmitCall, envelope: Envelope) -> Admitted:
        wait_ns, what = self._ledger.admit(call.tenant, call.request_id, call.num_prompt_tokens, self._now_ns())
        if not wait_ns:
            return Admitted()
        limits = self._tenants.get(call.tenant)
        limit = limits.requests_per_minute if what == "requests" else limits.tokens_per_minute
        why = f"the limit of {limit} {what} a minute is reached; retry in {math.ceil(wait_ns / 1e9)} s"
        raise BusError(Failure(code=Code.RATE_LIMITED, message=why, retry_after_s=wait_ns / 1e9))

    async def _on_used(self, used: TokensUsed, envelope: Envelope) -> Taken:
        self._ledger.end(used.tenant, used.request_id, used.num_output_tokens, self._now_ns())
        return Taken()

    def _now_ns(self) -> int:
        return int(self.now_s() * 1e9)
