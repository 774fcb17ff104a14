"""Asking again after silence, and not after a word."""

from __future__ import annotations

import asyncio

import pytest

from bus.bus import Bus, Delivery
from bus.insist import insist
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import CANCEL
from schemas.failure import Code, Failure
from schemas.message import Message
from schemas.request import Cancel, CancelAcknowledged
from tests.conftest import Run

DONE = CancelAcknowledged(request_id="r", was_running=True)


@pytest.mark.parametrize(
    ("answers", "expected", "num_asked"),
    [
        ([DONE], DONE, 1),
        ([None, None, DONE], DONE, 3),
        ([None, None, None, DONE], None, 3),
        ([None, Failure(code=Code.SHUTTING_DOWN, message="no"), DONE], None, 2),
        ([], None, 0),
    ],
)
def test_an_answer_is_waited_for(
    run_async: Run, answers: list[Message | None], expected: Message | None, num_asked: int
) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        ours, theirs = Bus(MemoryWire(broker)), Bus(MemoryWire(broker))
        await ours.open()
        asked: list[Delivery] = []
        tasks: set[asyncio.Task[None]] = set()

        def on_delivery(delivery: Delivery) -> None:
            answer = answers[len(asked)]
            asked.append(delivery)
            if answer is not None:
                tasks.add(asyncio.create_task(theirs.answer(delivery.reply, answer)))

        if answers:
            await theirs.wire.subscribe(CANCEL.at("e0").name, on_delivery)
        answer = await insist(ours, CANCEL.at("e0"), Cancel(request_id="r"), timeout_s=0.05, tries=3)
        assert (answer, len(asked)) == (expected, num_asked)
        await asyncio.gather(*tasks)

    run_async(main())
