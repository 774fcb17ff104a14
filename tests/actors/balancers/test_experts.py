"""When the experts of a group are looked at, what is told to whom, and how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs

from actors.balancers.actor import ExpertBalancer
from actors.balancers.experts import FIRST, WINDOW, Groups, Planned, Recent
from bus.actor import Actor
from bus.bus import Delivery, decoder
from bus.subjects import EXPERTS, PLACE_DECODE, PLACE_PREFILL, Subject
from run.simulator import World
from run.virtual import run_virtual
from schemas.experts import ExpertsUsed, PlaceExperts
from schemas.message import Role

NOW_NS = 1_000_000
SKEWED = [[90, 10, 80, 20, 1, 1, 1, 1], [50, 40, 1, 1]]
"""Rows by expert: of a layer, and of a draft stage, which has fewer experts. All hot ones are on rank 0."""

EVEN = [[5] * 8, [5] * 4]
OLD = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3]]


def used(
    num_steps: int, rank: int, rows: Sequence[Sequence[int]] = SKEWED, *, generation: int = 7, version: int = 0
) -> ExpertsUsed:
    return ExpertsUsed(
        role=Role.DECODE,
        id=f"d-{rank}",
        group="d-0",
        rank=rank,
        size=2,
        generation=generation,
        num_steps=num_steps,
        version=version,
        used=[np.array(of_layer, "<u4").tobytes() for of_layer in rows],
        places=[np.array(of_layer, "<u2").tobytes() for of_layer in OLD],
    )


def hear(recent: Recent, first: int, num: int, rows: Sequence[Sequence[int]] = SKEWED, version: int = 0) -> None:
    """Reports of both ranks at so many steps."""
    for step in range(first, first + num):
        for rank in range(2):
            assert recent.report(used(16 * step, rank, rows, version=version)) is None


def planned(recent: Recent) -> Planned | None:
    question = recent.question(used(0, 0))
    assert question is not None
    return recent.advised(question, question.answer(), NOW_NS)


def balances(found: Planned, rows: Sequence[Sequence[int]]) -> list[float]:
    """Max / mean rank load of each layer."""
    loads = []
    for places, of_layer in zip(found.places, rows, strict=True):
        ranks = np.array(of_layer)[np.frombuffer(places, "<u2").reshape(2, -1)].sum(1)
        loads.append(float(ranks.max() / ranks.mean()))
    return loads


def test_hot_experts_of_every_layer_are_spread_when_there_is_enough_to_look_at() -> None:
    recent = Recent(7, 2)
    hear(recent, 1, FIRST - 1)
    assert recent.question(used(0, 0)) is None
    hear(recent, FIRST, 1)
    found = planned(recent)
    assert found is not None and found.version == NOW_NS
    for places, old in zip(found.places, OLD, strict=True):
        assert sorted(np.frombuffer(places, "<u2").tolist()) == old
    assert max(balances(found, SKEWED)) < 1.12 < 1.9 < recent.balance
    assert recent.num_plans == 1


def test_only_steps_that_all_ranks_reported_count() -> None:
    recent = Recent(7, 2)
    for step in range(1, FIRST):
        assert recent.report(used(16 * step, step % 2)) is None  # the other one was lost
    assert recent.report(used(0, 1)) is None  # late: no other one was for that step
    hear(recent, FIRST, FIRST - 1)
    assert recent.question(used(0, 0)) is None
    hear(recent, 2 * FIRST, 1)
    question = recent.question(used(0, 0))
    assert question is not None and len(question.rows) == FIRST
    assert all(row[0].tolist() == [2 * rows for rows in SKEWED[0]] for row in question.rows)  # of both ranks


def test_a_plan_is_said_again_until_all_ranks_have_carried_it_out() -> None:
    recent = Recent(7, 2)
    hear(recent, 1, FIRST)
    found = planned(recent)
    assert found is not None
    for step in range(100 - FIRST, 101):
        assert recent.report(used(16 * step, 0)) is None  # one rank's report is no step
        assert recent.report(used(16 * step, 1)) == found
    assert recent.question(used(0, 0)) is None
    assert recent.report(used(1616, 0, version=found.version)) is None
    assert recent.report(used(1616, 1)) == found
    hear(recent, 102, WINDOW, version=found.version)
    question = recent.question(used(0, 0))
    assert question is not None and len(question.rows) == WINDOW
    again = recent.advised(question, question.answer(), NOW_NS)  # ranks report the old places still
    assert again is not None and again.version > found.version


def test_what_does_not_pay_is_not_done_and_looked_at_again_later() -> None:
    recent = Recent(7, 2)
    hear(recent, 1, FIRST, EVEN)
    assert planned(recent) is None and (recent.balance, recent.num_plans) == (1.0, 0)
    hear(recent, 1 + FIRST, FIRST - 1, EVEN)
    assert recent.question(used(0, 0)) is None
    hear(recent, 2 * FIRST, 1, EVEN)
    question = recent.question(used(0, 0))
    assert question is not None
    hear(recent, 2 * FIRST + 1, FIRST)
    assert recent.question(used(0, 0)) is None  # one at a time
    assert recent.advised(question, question.answer(), NOW_NS) is None
    assert recent.question(used(0, 0)) is not None


def test_ranks_that_have_met_again_begin_anew() -> None:
    groups = Groups()
    hear(groups.of(used(16, 0)), 1, FIRST - 1)
    assert groups.of(used(16, 0)) is groups.of(used(32, 1))
    anew = groups.of(used(16, 0, generation=8))
    hear(anew, FIRST, 1)
    assert anew.generation == 8 and anew.question(used(0, 0)) is None
    assert groups.of(used(48, 0)) is None and groups.of(used(16, 0, generation=8)) is anew  # late word of before
    for other in (structs.replace(used(16, 0), role=Role.PREFILL), structs.replace(used(16, 0), group="e-0")):
        assert groups.of(other) is not anew
    assert groups.detail() == {"groups": 3.0, "plans": 0.0, "imbalance": 1.0}


@pytest.mark.parametrize(("role", "place"), [(Role.DECODE, PLACE_DECODE), (Role.PREFILL, PLACE_PREFILL)])
def test_the_actor_tells_every_rank_until_all_have_done_it(role: Role, place: Subject[PlaceExperts, None]) -> None:
    async def main() -> None:
        world = World(0)
        told: list[tuple[str, PlaceExperts]] = []

        def on_delivery(delivery: Delivery) -> None:
            told.append((delivery.subject, decoder(PlaceExperts).decode(delivery.body)))

        ranks = await world.bus("ranks")
        await ranks.wire.subscribe("shoal.*.*.place", on_delivery)
        actor: Actor = ExpertBalancer("xb0", await world.bus("xb0"))
        await world.add(actor)
        await asyncio.sleep(1)
        for step in range(1, FIRST + 2):
            for rank in range(2):
                await ranks.tell(EXPERTS.at(role), structs.replace(used(16 * step, rank), role=role))
            await asyncio.sleep(0.1)
        first, *rest = (message for _, message in told)
        assert {subject for subject, _ in told} == {place.at(f"d-{rank}").name for rank in range(2)}
        assert (first.generation, first.version) == (7, int(3.4e9)) and len(told) == 4 and rest == [first] * 3
        assert actor.load().detail["plans"] == 1.0
        await world.stop()

    run_virtual(main())
