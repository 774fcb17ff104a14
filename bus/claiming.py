"""Taking a request over: its state from who offers it, from its entrypoint the claim, and what it made before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bus.bulk import Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import CLAIM, RESEND
from schemas.failure import Code
from schemas.handover import Claim, Claimed, ClaimRefused, HandOver, Refused
from schemas.request import Resend

PULL_S = 30.0
ASK_S = 5.0
ATTEMPTS = 3


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
        output = await output_before(bus, offer) if offer.sampling.grammar else []
        if why_not := await prepare(state, output):
            return Refused(reason=why_not)
        answer = await claim(bus, offer, replica, generation)
    except BusError as error:
        return Refused(reason=str(error))
    return answer if isinstance(answer, Claimed) else Refused(reason=answer.reason, is_final=True)


async def claim(bus: Bus, offer: HandOver, replica: str, generation: int) -> Claimed | ClaimRefused:
    """The entrypoint's answer; asked again when it is silent. Raises BusError."""
    life = {"pid": bus.seams.pid, "generation": generation}
    message = Claim(request_id=offer.request_id, from_epoch=offer.epoch, replica=replica, **life)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await bus.ask(CLAIM.at(offer.entrypoint), message, timeout_s=ASK_S)
        except BusError as error:
            if error.code is not Code.DEADLINE_EXCEEDED or attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def output_before(bus: Bus, offer: HandOver) -> list[int]:
    """The output of the request on offer so far, which only its entrypoint has: as many messages as it takes. Raises
    BusError."""
    tokens: list[int] = []
    while len(tokens) < offer.num_output:
        names, firsts, epochs = [offer.request_id], [len(tokens)], [offer.epoch]
        asked = Resend(request_ids=names, first_indexes=firsts, epochs=epochs, without_logprobs=True)
        answer = await bus.ask(RESEND.at(offer.entrypoint), asked, timeout_s=ASK_S)
        if not answer.tokens:
            raise fail(Code.WORKER_LOST, "the entrypoint does not have the output of this request")
        tokens += answer.tokens
    return tokens[: offer.num_output]
