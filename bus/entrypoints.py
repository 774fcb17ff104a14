"""Giving a request to the entrypoint shard that it belongs to, and taking it back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.insist import insist
from bus.subjects import CANCEL, RESEND, SUBMIT
from schemas.bulk import Payload
from schemas.failure import Code
from schemas.request import Cancel, CancelReason, Resend, Submit, TokensEmitted

ASK_TIMEOUT_S = 5.0
TRIES = 3
"""So many questions in a row without an answer, and a shard counts as lost."""


@asynccontextmanager
async def offered(bulk: Bulk, prompt: bytes) -> AsyncIterator[Payload]:
    """A prompt as a payload, no longer on offer if what is done with it raises `BusError`."""
    payload = await bulk.wrap(prompt)
    try:
        yield payload
    except BusError:
        if payload.handle is not None:
            bulk.withdraw(payload.handle)
        raise


async def place(
    bus: Bus,
    submit: Submit,
    owner: Callable[[Collection[str]], str],
    is_over: Callable[[], bool],
    taken: Callable[[], str],
) -> str:
    """The shard that took it: the one its id belongs to, asked again when silent, or the next one if that is gone.

    `owner` says whose it is, of those not tried yet; empty while none has reported itself. `taken`: who has sent tokens
    of it already, empty if nobody has; one that has ended would begin anew if asked again. Raises BusError: the shard's
    own, worker_lost when it stays silent, cancelled once `is_over`.
    """
    tried: set[str] = set()
    num_silences = 0
    while not is_over():
        shard = owner(tried)
        try:
            return (await bus.ask(SUBMIT.at(shard) if shard else SUBMIT.any(), submit, timeout_s=ASK_TIMEOUT_S)).shard
        except BusError as error:
            if sender := taken():
                return sender
            if shard and error.code in (Code.NO_RESPONDERS, Code.SHUTTING_DOWN):
                tried.add(shard)
            elif error.code is not Code.DEADLINE_EXCEEDED:
                raise
            elif not shard:  # whoever has it now, another one would have it, too
                raise fail(Code.WORKER_LOST, "no entrypoint answers") from None
            elif (num_silences := num_silences + 1) == TRIES:
                raise fail(Code.WORKER_LOST, "the entrypoint that the request belongs to is silent") from None
    raise fail(Code.CANCELLED, "the request was cancelled")


async def ask_after(bus: Bus, shard: str, resend: Resend) -> TokensEmitted | None:
    """What a shard says that was missed of these requests; None if the broker was away meanwhile. Raises BusError."""
    away_s = bus.wire.away_s
    try:
        return await bus.ask(RESEND.at(shard), resend, timeout_s=ASK_TIMEOUT_S)
    except BusError as error:
        if error.code is Code.DEADLINE_EXCEEDED and bus.wire.away_s > away_s:
            return None
        raise


async def cancel_at(bus: Bus, shard: str, request_id: str, reason: CancelReason) -> bool:
    """Tell the shard until it acknowledges, or is gone. True if the request was running there."""
    cancel = Cancel(request_id=request_id, reason=reason)
    answer = await insist(bus, CANCEL.at(shard), cancel, timeout_s=ASK_TIMEOUT_S, tries=TRIES)
    return answer is not None and answer.was_running
