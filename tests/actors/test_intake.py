"""What a recipe takes on, and which shards it knows."""

from __future__ import annotations

import pytest

from actors.recipe.fields import Refusal
from actors.recipe.intake import MAX_BYTES, MAX_CALLS, MAX_OPEN, Intake
from actors.recipe.shards import MAX_STRIKES, Shards
from schemas.failure import Code
from schemas.message import Role
from schemas.routing import LoadReported


def is_full(intake: Intake, num_open: int, body_bytes: int) -> bool:
    try:
        intake.take(num_open, body_bytes)
    except Refusal as refusal:
        assert refusal.failure.code is Code.OVERLOADED
        return True
    return False


def test_requests_calls_and_bytes_are_bounded() -> None:
    intake = Intake()
    assert is_full(intake, MAX_OPEN, 0) and not is_full(intake, MAX_OPEN - 1, 0)
    for _ in range(MAX_CALLS - 1):
        intake.take(0, 0)
    assert is_full(intake, 0, 0)
    with intake.working(0):
        pass
    assert not is_full(intake, 0, MAX_BYTES)


def test_what_is_refused_counts_for_nothing_and_what_fails_is_given_back() -> None:
    intake = Intake()
    intake.take(0, MAX_BYTES - 1)
    assert is_full(intake, 0, 2)
    assert (intake.num_calls, intake.num_bytes) == (1, MAX_BYTES - 1)
    with pytest.raises(ValueError), intake.working(MAX_BYTES - 1):
        raise ValueError
    assert (intake.num_calls, intake.num_bytes) == (0, 0)


def report(id: str, incarnation: str = "1", is_accepting: bool = True) -> LoadReported:
    return LoadReported(
        role=Role.ENTRYPOINT, id=id, incarnation=incarnation, seq=1, pid=1, host="h", is_accepting=is_accepting
    )


def test_a_request_has_one_owner_until_it_is_gone() -> None:
    shards = Shards()
    assert shards.owner("r", (), 0.0) == ""
    for id in ("a", "b", "c"):
        assert shards.saw(report(id), 0.0)
    owner = shards.owner("r", (), 0.0)
    assert shards.owner("r", (), 1.0) == owner != shards.owner("r", {owner}, 1.0) != ""
    assert shards.owner("r", {"a", "b", "c"}, 1.0) == ""
    assert not shards.saw(report(owner, is_accepting=False), 1.0)
    assert owner not in shards.alive(1.0)


def test_silence_in_a_row_is_a_loss_and_nothing_is_kept_of_the_lost() -> None:
    shards = Shards()
    for _ in range(MAX_STRIKES - 1):
        assert not shards.was_silent("a")
    shards.answered("a")
    for _ in range(MAX_STRIKES - 1):
        assert not shards.was_silent("a")
    assert shards.was_silent("a")
    shards.forget("a")
    assert not shards._strikes
    assert not shards.was_silent("a")
