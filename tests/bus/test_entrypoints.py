"""Placing a request: who is asked, in what order, when shards are gone or silent."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import pytest

from actors.recipe.submission import Submission
from bus import entrypoints
from bus.bus import BusError, Seams, fail
from bus.entrypoints import Elsewhere, place
from run.virtual import run_virtual
from schemas.bulk import Payload
from schemas.failure import Code
from schemas.request import Limits, Submitted
from tests.actors.builders import submit

SILENT = "silent"


class _Bus:
    """Answers in turn; None: there is nobody; SILENT: whoever is there does not answer."""

    def __init__(self, *answers: str | None, then: Iterable[str | None] = ()) -> None:
        self.asked: list[str] = []
        self.seams = Seams(clock_ns=lambda: int(asyncio.get_running_loop().time() * 1e9))
        self._answers = chain(answers, then)

    async def ask(self, address: Any, message: Any, *, timeout_s: float) -> Submitted:
        self.asked.append(address.name.split(".")[2])
        if (answer := next(self._answers)) is None:
            raise fail(Code.NO_RESPONDERS, "nobody")
        if answer == SILENT:
            await asyncio.sleep(timeout_s)
            raise fail(Code.DEADLINE_EXCEEDED, "no answer")
        return Submitted(shard=answer)


def test_a_shard_that_was_gone_is_asked_again_when_all_others_are() -> None:
    def owner(tried: Collection[str]) -> str:
        return next((shard for shard in ("e0", "e1") if shard not in tried), "")

    async def main() -> None:
        bus: Any = _Bus(None, None, None, "e0")
        assert await place(bus, submit("r"), owner, lambda: False, lambda: "", 5.0) == "e0"
        assert bus.asked == ["e0", "e1", "any", "e0"]

    run_virtual(main())


def test_a_silent_shard_is_asked_again_by_the_same_id_and_no_other_one_is() -> None:
    """It may have the request. Once that is another one's, that one is to know it by another id."""

    async def asked(bus: Any, *owners: str) -> str:
        turns = iter(owners)
        return await place(bus, submit("r"), lambda tried: next(turns), lambda: False, lambda: "")

    async def main() -> None:
        assert await asked(_Bus(SILENT, SILENT, "e0"), "e0", "e0", "e0") == "e0"
        for told in (SILENT, None):
            bus = _Bus(SILENT, told)
            with pytest.raises(Elsewhere):
                await asked(bus, "e0", "e0", "e1")
            assert bus.asked == ["e0", "e0"]

    run_virtual(main())


class _Bulk:
    async def wrap(self, data: bytes) -> Payload:
        return Payload(inline=data)


@dataclass
class _Request:
    shard: str = ""
    is_placing: bool = False
    is_cancelled: bool = False


def test_what_a_silent_shard_took_of_the_time_of_a_request_is_not_waited_for_again() -> None:
    async def main() -> None:
        loop, bus = asyncio.get_running_loop(), _Bus(SILENT, then=repeat(None))
        limits = Limits(max_tokens=1, deadline_ns=int((loop.time() + 8.0) * 1e9))
        submission = Submission(submit("r", limits=limits), b"")

        def owner(tried: Collection[str]) -> str:
            return "e0" if not bus.asked else "" if "e1" in tried else "e1"

        parts: Any = bus, _Bulk(), _Request(), submission, owner, submission.move
        with pytest.raises(BusError) as gone:
            await entrypoints.submit(*parts)
        assert gone.value.code is Code.NO_RESPONDERS and submission.id == "r-1"
        assert loop.time() < limits.deadline_ns / 1e9 + 0.2

    run_virtual(main())
