"""Taking a request over: the claim is made until it is heard, and one that is refused for good says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bus.bus import BusError, fail
from bus.claiming import ATTEMPTS, take_over
from schemas.failure import Code
from schemas.handover import Claimed, ClaimRefused, Refused
from tests.actors.builders import hand_over


class Asked:
    """A bus that answers so, one after the other; and the way to a state."""

    def __init__(self, *answers: Claimed | ClaimRefused | BusError) -> None:
        self.answers = list(answers)
        self.seams = SimpleNamespace(pid=7)

    async def ask(self, *_: Any, **__: Any) -> Claimed | ClaimRefused:
        answer = self.answers.pop(0)
        if isinstance(answer, BusError):
            raise answer
        return answer

    async def pull(self, *_: Any, **__: Any) -> bytes:
        return b"state"


async def fine(state: bytes, output: list[int]) -> str:
    assert (state, output) == (b"state", [])
    return ""


SILENT, GONE = fail(Code.DEADLINE_EXCEEDED, "silent"), fail(Code.NO_RESPONDERS, "gone")


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([SILENT, SILENT, Claimed(epoch=3)], Claimed(epoch=3)),
        ([SILENT] * ATTEMPTS, Refused(reason=str(SILENT))),
        ([GONE], Refused(reason=str(GONE))),
        ([ClaimRefused(reason="ended")], Refused(reason="ended", is_final=True)),
    ],
)
def test_a_claim_is_made_until_it_is_heard(answers: list[Any], found: Claimed | Refused) -> None:
    bus: Any = Asked(*answers)
    assert asyncio.run(take_over(bus, bus, hand_over(), "d0", 0, fine)) == found
    assert not bus.answers
