"""Taking a request over: its state from who offers it, from its entrypoint the claim, and what it made before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import CLAIM, RESEND, Address
from schemas.failure import Code
from schemas.handover import Claim, Claimed, ClaimRefused, HandOver, Refused
from schemas.message import Message
from schemas.request import Resend

M = TypeVar("M", bound=Message)
R = TypeVar("R")

PULL_S = 30.0
ASK_S = 5.0
ATTEMPTS = 3
PAUSE_S = 1.0


async def take_over(
    bus: Bus,
    bulk: Bulk,
    offer: HandOver,
    replica: str,
    generation: int,
    prepare: Callable[[bytes, list[int]], Awaitable[str]],
) -> Claimed | Refused:
    """Pull the state of a request on offer, `prepare` to go on with it, and claim it then.

    `prepare` is given the state and, for a grammar, the output so far; it says why that cannot be gone on with, if so.
    """
    try:
        state = await bulk.pull(offer.state, timeout_s=PULL_S)
    except BusError as error:
        return Refused(reason=str(error))
    try:
        output = await output_before(bus, offer) if offer.sampling.grammar else []
        if why_not := await prepare(state, output):
            return Refused(reason=why_not)
        answer = await claim(bus, offer, replica, generation)
    except BusError as error:  # an entrypoint that is gone is back without its requests
        return Refused(reason=str(error), is_final=error.code in (Code.NO_RESPONDERS, Code.WORKER_LOST))
    return answer if isinstance(answer, Claimed) else Refused(reason=answer.reason, is_final=True)


async def claim(bus: Bus, offer: HandOver, replica: str, generation: int) -> Claimed | ClaimRefused:
    """The entrypoint's answer. Raises BusError."""
    life = {"pid": bus.seams.pid, "generation": generation}
    claim = Claim(request_id=offer.request_id, from_epoch=offer.epoch, replica=replica, **life)
    return await _ask(bus, CLAIM.at(offer.entrypoint), claim)


async def _ask(bus: Bus, address: Address[M, R], message: M) -> R:
    """Asked again when it is silent, or not there: it may only have lost its connection. Raises BusError."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await bus.ask(address, message, timeout_s=ASK_S)
        except BusError as error:
            if error.code not in (Code.DEADLINE_EXCEEDED, Code.NO_RESPONDERS) or attempt == ATTEMPTS:
                raise
            if error.code is Code.NO_RESPONDERS:
                await asyncio.sleep(PAUSE_S)
    raise AssertionError("unreachable")


async def output_before(bus: Bus, offer: HandOver) -> list[int]:
    """The output of the request on offer so far, which only its entrypoint has: as many messages as it takes. Raises
    BusError."""
    tokens: list[int] = []
    while len(tokens) < offer.num_output:
        names, firsts, epochs = [offer.request_id], [len(tokens)], [offer.epoch]
        asked = Resend(request_ids=names, first_indexes=firsts, epochs=epochs, without_logprobs=True)
        answer = await _ask(bus, RESEND.at(offer.entrypoint), asked)
        if not answer.tokens:
            raise fail(Code.WORKER_LOST, "the entrypoint does not have the output of this request")
        tokens += answer.tokens
    return tokens[: offer.num_output]
