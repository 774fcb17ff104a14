"""OTP's rules: by hand, and against a model that keeps its own books."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisors.strategy import Children, GaveUp, Intensity, Plan, Restart, Strategy

PLENTY = Intensity(100, 1.0)
P, T, X = Restart.PERMANENT, Restart.TRANSIENT, Restart.TEMPORARY


def children(strategy: Strategy, *restarts: Restart, intensity: Intensity = PLENTY) -> Children:
    """Children a, b, c… with these restart types, all alive."""
    made = Children(dict(zip("abcdefgh", restarts, strict=False)), strategy, intensity)
    for name in made.names:
        made.started(name)
    return made


@pytest.mark.parametrize(
    ("strategy", "plan"),
    [
        (Strategy.ONE_FOR_ONE, Plan([], ["b"])),
        (Strategy.REST_FOR_ONE, Plan(["d", "c"], ["b", "c", "d"])),
        (Strategy.ONE_FOR_ALL, Plan(["d", "c", "a"], ["a", "b", "c", "d"])),
    ],
)
def test_strategies_stop_in_reverse_and_start_in_order(strategy: Strategy, plan: Plan) -> None:
    assert children(strategy, P, P, P, P).exited("b", is_normal=False, now_s=0.0) == plan


@pytest.mark.parametrize("strategy", Strategy)
def test_transient_stays_down_after_a_normal_exit_only(strategy: Strategy) -> None:
    assert children(strategy, P, T, P).exited("b", is_normal=True, now_s=0.0) == Plan([], [])
    assert "b" in children(strategy, P, T, P).exited("b", is_normal=False, now_s=0.0).start


@pytest.mark.parametrize("strategy", Strategy)
def test_permanent_returns_also_after_a_normal_exit(strategy: Strategy) -> None:
    assert "b" in children(strategy, P, P, P).exited("b", is_normal=True, now_s=0.0).start


@pytest.mark.parametrize("strategy", Strategy)
def test_temporary_is_forgotten_and_disturbs_nobody(strategy: Strategy) -> None:
    tree = children(strategy, P, X, P)
    assert tree.exited("b", is_normal=False, now_s=0.0) == Plan([], [])
    assert tree.names == ["a", "c"]


def test_temporary_taken_down_by_a_sibling_is_not_started_again() -> None:
    tree = children(Strategy.REST_FOR_ONE, P, X, P)
    plan = tree.exited("a", is_normal=False, now_s=0.0)
    assert plan == Plan(["c", "b"], ["a", "c"])
    for name in plan.stop:
        tree.stopped(name)
    assert tree.names == ["a", "c"]


def test_a_transient_that_had_ended_is_started_with_its_siblings() -> None:
    tree = children(Strategy.ONE_FOR_ALL, P, T)
    tree.exited("b", is_normal=True, now_s=0.0)
    assert tree.exited("a", is_normal=False, now_s=0.0) == Plan([], ["a", "b"])


def test_a_child_that_fails_to_start_during_a_plan_is_planned_with_those_behind_it() -> None:
    tree = children(Strategy.REST_FOR_ONE, P, P, P)
    plan = tree.exited("a", is_normal=False, now_s=0.0)
    for name in plan.stop:
        tree.stopped(name)
    tree.started("a")
    tree.started("b")
    assert tree.exited("b", is_normal=False, now_s=0.1) == Plan([], ["b", "c"])


def test_intensity_is_a_sliding_window() -> None:
    tree = children(Strategy.ONE_FOR_ONE, P, intensity=Intensity(2, 5.0))
    for now_s in (0.0, 4.0, 5.1, 9.1):  # at most two within any five seconds
        tree.exited("a", is_normal=False, now_s=now_s)
        tree.started("a")
    with pytest.raises(GaveUp, match=r"a ended once too often: more than 2 restarts within 5 s"):
        tree.exited("a", is_normal=False, now_s=10.0)


def test_each_child_may_end_as_often_as_is_said_of_each() -> None:
    tree = children(Strategy.ONE_FOR_ONE, P, P, P, intensity=Intensity(2, 5.0, is_each=True))
    for name in "abcabc":
        tree.exited(name, is_normal=False, now_s=0.0)
        tree.started(name)
    with pytest.raises(GaveUp, match="b ended once too often"):
        tree.exited("b", is_normal=False, now_s=0.0)


def test_zero_intensity_gives_up_at_the_first_exit() -> None:
    with pytest.raises(GaveUp):
        children(Strategy.ONE_FOR_ONE, P, intensity=Intensity(0, 5.0)).exited("a", is_normal=False, now_s=0.0)


exits = st.lists(
    st.tuples(st.integers(0, 4), st.booleans(), st.floats(0.0, 3.0)),
    min_size=1,
    max_size=30,
)


@given(st.sampled_from(Strategy), st.lists(st.sampled_from(Restart), min_size=5, max_size=5), exits)
def test_any_history(strategy: Strategy, restarts: list[Restart], history: list[tuple[int, bool, float]]) -> None:
    """Permanent children are always up after a plan; plans are ordered; the window is what a plain count says."""
    kinds = dict(zip("abcde", restarts, strict=True))
    tree = children(strategy, *restarts, intensity=Intensity(4, 5.0))
    now_s, counted = 0.0, list[float]()
    for index, is_normal, gap_s in history:
        now_s += gap_s
        name = "abcde"[index]
        if name not in tree.alive:
            continue
        before = set(tree.alive)
        stays_down = kinds[name] is X or (kinds[name] is T and is_normal)
        if not stays_down:
            counted = [t for t in counted if now_s - t <= 5.0] + [now_s]
            if len(counted) > 4:
                with pytest.raises(GaveUp):
                    tree.exited(name, is_normal=is_normal, now_s=now_s)
                return
        plan = tree.exited(name, is_normal=is_normal, now_s=now_s)
        assert plan.stop == sorted(plan.stop, reverse=True)
        assert plan.start == sorted(plan.start)
        assert set(plan.stop) <= before - {name}
        assert (name in plan.start) == (not stays_down)
        for other in plan.stop:
            tree.stopped(other)
        for other in plan.start:
            tree.started(other)
        untouched = before - {name} - set(plan.stop)
        assert set(tree.alive) == untouched | set(plan.start)
        assert {n for n, kind in kinds.items() if kind is P} <= set(tree.alive)
