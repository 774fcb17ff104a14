"""Rounds of pings, and whom they find out."""

from __future__ import annotations

from supervisors.liveness import Liveness


def test_a_process_with_one_silent_actor_is_found_out_at_the_limit() -> None:
    watch = Liveness(3)
    watch.watch("front", ["gateway/g0", "recipe/r0"])
    watch.watch("decode", ["decode/d0"])
    silent = [("front", "recipe/r0")]
    assert [watch.end_round(silent) for _ in range(3)] == [[], [], ["front"]]
    assert watch.members() == [("decode", "decode/d0")]


def test_one_answer_starts_the_count_anew() -> None:
    watch = Liveness(2)
    watch.watch("a", ["x/1"])
    assert watch.end_round([("a", "x/1")]) == []
    assert watch.end_round([]) == []
    assert watch.end_round([("a", "x/1")]) == []
    assert watch.end_round([("a", "x/1")]) == ["a"]


def test_different_actors_missing_in_turn_are_not_a_hang() -> None:
    watch = Liveness(2)
    watch.watch("a", ["x/1", "x/2"])
    assert [watch.end_round([("a", f"x/{1 + i % 2}")]) for i in range(4)] == [[], [], [], []]


def test_a_void_round_proves_nothing() -> None:
    watch = Liveness(2)
    watch.watch("a", ["x/1"])
    watch.end_round([("a", "x/1")])
    watch.void()
    assert watch.end_round([("a", "x/1")]) == []


def test_a_new_life_starts_anew_and_the_dead_are_not_pinged() -> None:
    watch = Liveness(2)
    watch.watch("a", ["x/1"])
    watch.end_round([("a", "x/1")])
    watch.forget("a")
    watch.forget("a")
    assert watch.members() == []
    assert watch.end_round([("a", "x/1")]) == []  # the tail of a round that began before it ended
    watch.watch("a", ["x/1"])
    assert watch.end_round([("a", "x/1")]) == []
