"""Placing a request: who is asked, in what order, when shards are gone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bus.bus import fail
from bus.entrypoints import place
from run.virtual import run_virtual
from schemas.failure import Code
from schemas.request import Submitted
from tests.actors.builders import submit


class _Bus:
    """Answers in turn; None: there is nobody."""

    def __init__(self, *answers: str | None) -> None:
        self.asked: list[str] = []
        self._answers = iter(answers)

    async def ask(self, address: Any, message: Any, *, timeout_s: float) -> Submitted:
        self.asked.append(address.name.split(".")[2])
        if (answer := next(self._answers)) is None:
            raise fail(Code.NO_RESPONDERS, "nobody")
        return Submitted(shard=answer)


def test_a_shard_that_was_gone_is_asked_again_when_all_others_are() -> None:
    def owner(tried: Collection[str]) -> str:
        return next((shard for shard in ("e0", "e1") if shard not in tried), "")

    async def main() -> None:
        bus: Any = _Bus(None, None, None, "e0")
        assert await place(bus, submit("r"), owner, lambda: False, lambda: "", 5.0) == "e0"
        assert bus.asked == ["e0", "e1", "any", "e0"]

    run_virtual(main())
