"""Taking a request over: the claim is made until it is heard, and one that is refused for good says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from bus.bus import BusError, fail
from bus.claiming import ATTEMPTS, take_over
from schemas.failure import Code
from schemas.handover import Claimed, ClaimRefused, Refused
from schemas.request import TokensEmitted
from tests.actors.builders import GREEDY, hand_over


class Asked:
    """A bus that answers so, one after the other; and the way to a state."""

    def __init__(self, *answers: Claimed | ClaimRefused | TokensEmitted | BusError) -> None:
        self.answers = list(answers)
        self.seams = SimpleNamespace(pid=7)

    async def ask(self, *_: Any, **__: Any) -> Claimed | ClaimRefused | TokensEmitted:
        answer = self.answers.pop(0)
        if isinstance(answer, BusError):
            raise answer
        return answer

    async def pull(self, *_: Any, **__: Any) -> bytes:
        return b"state"


async def follow(state: bytes, output: list[int]) -> str:
    assert output == [5, 6]
    return ""


async def fine(state: bytes, output: list[int]) -> str:
    assert (state, output) == (b"state", [])
    return ""


SILENT, GONE = fail(Code.DEADLINE_EXCEEDED, "silent"), fail(Code.NO_RESPONDERS, "gone")
OUTPUT = TokensEmitted(source="e", request_ids=["r1"], epochs=[1], first_indexes=[0], counts=[2], tokens=[5, 6])
NONE = structs.replace(OUTPUT, counts=[0], tokens=[])
UNKNOWN = Refused(reason="worker_lost: the entrypoint does not have the output of this request", is_final=True)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.claiming.PAUSE_S", 0.0)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([SILENT, GONE, Claimed(epoch=3)], Claimed(epoch=3)),
        ([SILENT] * ATTEMPTS, Refused(reason=str(SILENT))),
        ([GONE] * ATTEMPTS, Refused(reason=str(GONE), is_final=True)),
        ([ClaimRefused(reason="ended")], Refused(reason="ended", is_final=True)),
    ],
)
def test_a_claim_is_made_until_it_is_heard(answers: list[Any], found: Claimed | Refused) -> None:
    bus: Any = Asked(*answers)
    assert asyncio.run(take_over(bus, bus, hand_over(), "d0", 0, fine)) == found
    assert not bus.answers


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([OUTPUT, Claimed(epoch=3)], Claimed(epoch=3)),
        ([SILENT, GONE, OUTPUT, Claimed(epoch=3)], Claimed(epoch=3)),
        ([NONE], UNKNOWN),  # it was restarted: nobody else is to try, either
        ([GONE] * ATTEMPTS, Refused(reason=str(GONE), is_final=True)),
    ],
)
def test_the_output_before_is_had_of_whoever_has_the_request(answers: list[Any], found: Claimed | Refused) -> None:
    bus: Any = Asked(*answers)
    offer = structs.replace(hand_over(), sampling=structs.replace(GREEDY, grammar="x"), num_output=2)
    assert asyncio.run(take_over(bus, bus, offer, "d0", 0, follow)) == found
    assert not bus.answers
