"""Giving a request to the entrypoint shard that it belongs to, and taking it back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.insist import insist
from bus.subjects import CANCEL, RESEND, SUBMIT
from schemas.bulk import Payload
from schemas.failure import Code
from schemas.request import Cancel, CancelReason, Resend, Submit, TokensEmitted

GONE = (Code.NO_RESPONDERS, Code.SHUTTING_DOWN)
PAUSE_S = 0.1
ASK_TIMEOUT_S = 5.0
TRIES = 3
"""So many questions in a row without an answer, and a shard counts as lost."""


class Elsewhere(BusError):
    """A shard was silent, and the request is another one's now. The silent one may yet go on with it."""

    def __init__(self) -> None:
        super().__init__(fail(Code.WORKER_LOST, "the entrypoint that the request belongs to is silent").failure)


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
    patience_s: float = 0.0,
    worth_waiting: Collection[Code] = GONE,
) -> str:
    """The shard that took it: the one its id belongs to, asked again when silent, or the next one if that is gone.

    `owner` says whose it is, of those not tried yet; empty while none has reported itself. `taken`: who has sent tokens
    of it already, empty if nobody has; one that has ended would begin anew if asked again. `patience_s`: how long to
    wait where the answer is one of those `worth_waiting` for. Raises BusError: the shard's own, worker_lost when it
    stays silent, cancelled once `is_over`; Elsewhere when it is another one's after a silence.
    """
    tried: set[str] = set()
    silent, num_silences = "", 0
    end_s = asyncio.get_running_loop().time() + patience_s
    while not is_over():
        shard = owner(tried)
        if silent and shard != silent:
            raise Elsewhere
        try:
            return (await bus.ask(SUBMIT.at(shard) if shard else SUBMIT.any(), submit, timeout_s=ASK_TIMEOUT_S)).shard
        except BusError as error:
            if sender := taken():
                return sender
            if shard and error.code in GONE:
                tried.add(shard)
            elif error.code in worth_waiting and asyncio.get_running_loop().time() < end_s:
                tried.clear()
                await asyncio.sleep(PAUSE_S)
            elif error.code is not Code.DEADLINE_EXCEEDED:
                raise
            elif not shard:  # whoever has it now, another one would have it, too
                raise fail(Code.WORKER_LOST, "no entrypoint answers") from None
            elif (num_silences := num_silences + 1) == TRIES:
                raise fail(Code.WORKER_LOST, "the entrypoint that the request belongs to is silent") from None
            else:
                silent = shard
    raise fail(Code.CANCELLED, "the request was cancelled")


class Submission(Protocol):
    """What a shard is given: `text` is the prompt, and what it has of output already."""

    @property
    def id(self) -> str: ...
    @property
    def text(self) -> bytes: ...
    @property
    def is_new(self) -> bool: ...
    def message(self, text: Payload) -> Submit: ...
    def patience_s(self, now_ns: int) -> float: ...


class Request(Protocol):
    """Who wants it computed. `shard`: who is known to have it, empty for nobody (any more)."""

    shard: str
    is_placing: bool
    is_cancelled: bool


async def submit(
    bus: Bus,
    bulk: Bulk,
    request: Request,
    submission: Submission,
    owner: Callable[[Collection[str]], str],
    rename: Callable[[], bool],
) -> None:
    """Have a shard take the request, and tell it if that was cancelled meanwhile; see `place`. Raises BusError; then
    nothing of it is left on offer.

    `rename`: it is to have another id, as a shard that may have it by this one is silent; False if that was too often.
    """
    request.is_placing = True
    again = GONE if submission.is_new else (*GONE, Code.OVERLOADED)
    try:
        while True:
            try:
                async with offered(bulk, submission.text) as text:
                    message, is_over = submission.message(text), lambda: request.is_cancelled
                    patience_s = submission.patience_s(bus.seams.clock_ns())
                    request.shard = await place(bus, message, owner, is_over, lambda: request.shard, patience_s, again)
                break
            except Elsewhere:
                if not rename():
                    raise
    finally:
        request.is_placing = False
    if request.is_cancelled:
        await cancel_at(bus, request.shard, submission.id, CancelReason.CLIENT)


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


async def cancel_all(bus: Bus, requests: Collection[tuple[str, str]]) -> bool:
    """The same of many, as (shard, id), that their clients want no more. True if any was running."""
    told = [cancel_at(bus, shard, request_id, CancelReason.CLIENT) for shard, request_id in requests]
    return any(await asyncio.gather(*told))
