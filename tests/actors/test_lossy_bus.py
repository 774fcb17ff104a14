"""A broker that loses and doubles messages: every request still ends once, with exactly its tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from bus.bus import Delivery
from bus.memory import MemoryWire
from kernels.timed import StepCost
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.request import Failed, Finished, FinishReason
from tests.actors.builders import submit
from tests.actors.core import core, quiet

LENGTH = Finished(reason=FinishReason.LENGTH)
COST = StepCost(step_ns=5_000_000)


class LossyBroker(RecordingBroker):
    """Loses about one in `one_in` of the messages whose subject `is_hit`, never two in a row, and doubles as many.
    Not in step with anything: of what comes in turns, the same would be lost for ever."""

    def __init__(self, is_hit: Callable[[str], bool], one_in: int) -> None:
        super().__init__()
        self._is_hit = is_hit
        self._one_in = one_in
        self._chance = random.Random(one_in)
        self._until_lost = one_in
        self.num_lost = 0

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if self._is_hit(delivery.subject):
            self._until_lost -= 1
            if self._until_lost == 0:
                self.num_lost += 1
                self._until_lost = self._one_in + (self._one_in > 1) * self._chance.randrange(2)
                return
            if self._until_lost == self._one_in - 1:
                super().publish(source, delivery)
        super().publish(source, delivery)


async def run(broker: RecordingBroker) -> tuple[dict[str, list[int]], dict[str, object], dict[str, int]]:
    async with core(2, 2, COST, broker) as system:
        requests = [submit(f"r{i}", num_tokens=50 + i, max_tokens=30) for i in range(12)]
        await asyncio.gather(*(system.finish(request) for request in requests))
        return dict(system.listener.tokens), dict(system.listener.ends), await quiet(system, 120.0)


@pytest.mark.parametrize("one_in", [2, 3, 7])
def test_lost_and_doubled_tokens_are_repaired_by_entrypoints(one_in: int) -> None:
    truth, _, _ = run_virtual(run(RecordingBroker()))
    broker = LossyBroker(lambda subject: subject.endswith(".e0.tokens"), one_in)
    tokens, ends, held = run_virtual(run(broker))
    assert broker.num_lost >= 3
    assert tokens == truth and set(ends.values()) == {LENGTH} and held == {}


@pytest.mark.parametrize("verbs", [("release",), ("load",), ("release", "load")])
def test_lost_releases_and_reports_leak_nothing(verbs: tuple[str, ...]) -> None:
    broker = LossyBroker(lambda subject: subject.endswith(verbs), 2)
    _, ends, held = run_virtual(run(broker))
    assert broker.num_lost >= 3
    assert set(ends.values()) == {LENGTH} and held == {}


@pytest.mark.parametrize("verb", ["route", "dispatch", "handover", "claim", "cancel", "resend"])
def test_lost_and_doubled_asks_still_give_every_request_one_end(verb: str) -> None:
    broker = LossyBroker(lambda subject: subject.endswith(verb), 3)
    tokens, ends, held = run_virtual(run(broker))
    truth, _, _ = run_virtual(run(RecordingBroker()))
    assert len(ends) == 12 and held == {}
    for request_id, end in ends.items():
        if isinstance(end, Failed):
            assert tokens[request_id] == truth[request_id][: len(tokens[request_id])]
        else:
            assert tokens[request_id] == truth[request_id]


@pytest.mark.parametrize("one_in", [2, 3, 5])
def test_lost_answers_take_no_request_from_its_owner(one_in: int) -> None:
    """Answers go to inboxes: receipts, and what asks wait for. The listener, who asks only once, is spared."""
    truth, _, _ = run_virtual(run(RecordingBroker()))
    broker = LossyBroker(lambda subject: not subject.startswith("shoal.") and subject.split(".")[1] != "1", one_in)
    tokens, ends, held = run_virtual(run(broker))
    assert broker.num_lost > 20
    assert len(ends) == 12 and held == {}
    for request_id, end in ends.items():
        if not isinstance(end, Failed):
            assert tokens[request_id] == truth[request_id]
