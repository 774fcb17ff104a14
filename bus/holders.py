"""Prefill and decode replicas as those who hold requests: told to let go of one, asked what was missed of others."""

from __future__ import annotations

from typing import Protocol

from bus import subjects
from bus.bus import Bus, BusError
from bus.insist import insist
from schemas.failure import Code
from schemas.message import Role
from schemas.request import Cancel, Resend, TokensEmitted

ASK_S = 5.0
MAX_STRIKES = 3
"""So many questions in a row without an answer, and a holder counts as lost (a stopped process keeps its socket)."""


class Holder(Protocol):
    """A replica: hashable, and equal to itself."""

    @property
    def role(self) -> Role: ...

    @property
    def replica(self) -> str: ...


class Holders:
    """The way to them, and how often in a row each was silent."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._strikes: dict[Holder, int] = {}

    async def cancel(self, holder: Holder, request_id: str, epoch: int) -> None:
        """Tell it, until it acknowledges or is silent for long, that it holds this request no more."""
        subject = subjects.CANCEL_PREFILL if holder.role is Role.PREFILL else subjects.CANCEL_DECODE
        cancel = Cancel(request_id=request_id, epoch=epoch)
        await insist(self._bus, subject.at(holder.replica), cancel, timeout_s=ASK_S, tries=MAX_STRIKES)

    async def ask_after(self, holder: Holder, resend: Resend) -> TokensEmitted | None:
        """What was missed of these requests; None if it is silent, for now. Raises BusError when it counts as lost."""
        subject = subjects.RESEND_PREFILL if holder.role is Role.PREFILL else subjects.RESEND_DECODE
        try:
            emitted = await self._bus.ask(subject.at(holder.replica), resend, timeout_s=ASK_S)
        except BusError as error:
            strikes = self._strikes[holder] = self._strikes.get(holder, 0) + 1
            if error.code is Code.NO_RESPONDERS or strikes >= MAX_STRIKES:
                raise
            return None
        self.forget(holder)
        return emitted

    def forget(self, holder: Holder) -> None:
        """Its strikes are of no account any more. Idempotent."""
        self._strikes.pop(holder, None)
