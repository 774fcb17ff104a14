"""A broker that loses and doubles what is said about images: each request ends once, and nothing is held for long."""

from __future__ import annotations

import asyncio

import pytest

from actors.vision.actor import LEASE_S
from kernels.timed import StepCost
from run.simulator import RecordingBroker
from run.virtual import run_virtual
from schemas.request import End, Failed, Finished, FinishReason
from tests.actors.core import quiet
from tests.actors.pictures import picture
from tests.actors.sight import sighted
from tests.actors.test_lossy_bus import LossyBroker

LENGTH = Finished(reason=FinishReason.LENGTH)
COST = StepCost(step_ns=5_000_000)
COLORS = ("red", "green", "blue", "white")


async def run(broker: RecordingBroker) -> tuple[dict[str, list[int]], dict[str, End], dict[str, int]]:
    async with sighted(2, cost=COST, broker=broker) as eyes:
        files = [[picture(color, 40 + 20 * i, 50) for color in COLORS[: i % 3 + 1]] for i in range(6)]
        submits = [await eyes.submit(*some, request_id=f"r{i}") for i, some in enumerate(files)]
        await asyncio.gather(*map(eyes.core.finish, submits))
        return dict(eyes.core.listener.tokens), dict(eyes.core.listener.ends), await quiet(eyes.core, 2 * LEASE_S)


@pytest.mark.parametrize(
    ("verb", "one_in"), [("encode", 4), ("encode", 5), ("release", 2), ("vision-balancer.any.route", 3)]
)
def test_lost_and_doubled_words_about_images_change_no_answer(verb: str, one_in: int) -> None:
    truth, _, _ = run_virtual(run(RecordingBroker()))
    broker = LossyBroker(lambda subject: subject.endswith(verb), one_in)
    tokens, ends, held = run_virtual(run(broker))
    assert broker.num_lost >= 2
    assert set(ends.values()) == {LENGTH}
    assert tokens == truth and held == {}


@pytest.mark.parametrize("verb", ["encode", "dispatch", "cancel"])
def test_however_much_is_lost_every_request_has_one_end(verb: str) -> None:
    truth, _, _ = run_virtual(run(RecordingBroker()))
    tokens, ends, held = run_virtual(run(LossyBroker(lambda subject: subject.endswith(verb), 2)))
    assert len(ends) == 6 and held == {}
    for request_id, end in ends.items():
        assert tokens[request_id] == ([] if isinstance(end, Failed) else truth[request_id])


def test_one_seed_gives_one_history() -> None:
    brokers = [RecordingBroker(), RecordingBroker()]
    for broker in brokers:
        run_virtual(run(broker))
    assert brokers[0].history == brokers[1].history
