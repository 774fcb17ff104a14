"""Taking over a request at its entrypoint: the claim, and what was made of it before."""

from __future__ import annotations

from bus.bus import Bus, BusError, fail
from bus.subjects import CLAIM, RESEND
from schemas.failure import Code
from schemas.handover import Claim, Claimed, ClaimRefused, HandOver
from schemas.request import Resend

ASK_S = 5.0
ATTEMPTS = 3


async def claim(bus: Bus, offer: HandOver, replica: str) -> Claimed | ClaimRefused:
    """The entrypoint's answer; asked again when it is silent. Raises BusError."""
    message = Claim(request_id=offer.request_id, from_epoch=offer.epoch, replica=replica)
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
        asked = Resend(request_ids=[offer.request_id], first_indexes=[len(tokens)], epochs=[offer.epoch])
        answer = await bus.ask(RESEND.at(offer.entrypoint), asked, timeout_s=ASK_S)
        if not answer.tokens:
            raise fail(Code.WORKER_LOST, "the entrypoint does not have the output of this request")
        tokens += answer.tokens
    return tokens[: offer.num_output]
