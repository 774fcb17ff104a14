"""The prefill balancer's policy."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from msgspec import structs

from actors.balancers.choice import Full, TooLate
from actors.balancers.prefill import MAX_WAIT_S, RAMP_S
from actors.rules.cost import PUBLISHED, Work
from tests.actors.pools import BY_TOKEN, OLD_S, SECOND, Pool, load, route

# The choice


def test_the_least_of_outstanding_and_cost_in_the_replicas_own_time() -> None:
    slow = dataclasses.replace(BY_TOKEN, token_ns=4e6)
    busy, idle = load("p0", left_s=1.0, reservations=(90,)), load("p1", cost=slow)
    assert Pool(busy, idle).route() == "p0"  # done in 2 s, there in 4
    assert Pool(load("p0", left_s=7.0, reservations=(90,)), idle).route(route(4000)) == "p0"  # 11, there 16
    many = load("p0", left_s=60.0, reservations=(90, 91, 92, 93))
    assert Pool(many, idle).route(route(4000)) == "p1"  # each of them as long as it is itself, and a step


def test_what_only_waits_to_be_handed_over_is_not_waited_for() -> None:
    pool = Pool(load("p0"), load("p1", left_s=2.5, reservations=(90, 91)))
    for number in range(4):
        pool.ledger.reserve(number, pool.ledger._replicas["p0"], route(), pool.now_s)
    pool.hear(load("p0", seq=2, left_s=50.0, reservations=(0, 1, 2, 3, 92), num_unfinished=1))
    assert pool.route() == "p0"  # one second of the only one that is left, and a step


def test_case_8_a_shared_prompt_is_spread_like_any_other() -> None:
    pool = Pool(*(load(f"p{number}") for number in range(4)))
    shared = route(256, num_cached=8192, num_replayed=128, num_blocks=64)
    assert set(Counter(pool.route(shared) for _ in range(80)).values()) == {20}


def test_equals_are_tried_in_turn_and_each_balancer_begins_elsewhere() -> None:
    ids = [f"p{number}" for number in range(8)]
    pool = Pool(*(load(id) for id in ids))
    chosen = []
    for _ in ids:
        chosen.append(pool.route())
        pool.now_s += 2.0  # it has been done meanwhile
        assert pool.ledger.release(pool.num_routed, pool.now_s)
        pool.hear(*(load(id, seq=2 + len(chosen)) for id in ids))
    assert sorted(chosen) == ids
    assert len({Pool(*(load(id) for id in ids), id=f"pb{number}").route() for number in range(8)}) > 3


def test_a_little_faster_is_no_reason_to_be_always_first() -> None:
    faster = dataclasses.replace(BY_TOKEN, token_ns=0.85e6)
    pool = Pool(load("p0", cost=faster), load("p1"))
    chosen = [pool.route()]
    pool.now_s += 5.0
    assert pool.ledger.release(1, pool.now_s)
    assert sorted([*chosen, pool.route()]) == ["p0", "p1"]
    much_faster = Pool(load("p0", cost=dataclasses.replace(BY_TOKEN, token_ns=0.5e6)), load("p1"))
    assert much_faster.route() == "p0"


@pytest.mark.parametrize("num_balancers", [1, 4])
def test_case_7_a_burst_at_four_balancers_is_balanced_by_nanoseconds(num_balancers: int) -> None:
    """No report comes in between, and none knows of the others."""
    chance = random.Random(7)
    pools = [Pool(*(load(f"p{i}", cost=PUBLISHED) for i in range(8)), id=f"pb{n}") for n in range(num_balancers)]
    reserved: Counter[str] = Counter()
    for number in range(800):
        wanted = route(int(chance.lognormvariate(7.5, 0.8)) + 1)
        reserved[pools[number % num_balancers].route(wanted)] += int(PUBLISHED.work_ns(Work(wanted.num_new)))
    assert len(reserved) == 8
    assert max(reserved.values()) / (sum(reserved.values()) / 8) < 1.2


# Case 9


@pytest.mark.parametrize("why", ["draining", "full", "refused"])
def test_case_9_who_takes_no_more_gets_nothing_new(why: str) -> None:
    pool = Pool(load("p0"), load("p1", left_s=60.0, reservations=(90,)))
    match why:
        case "draining":
            pool.hear(structs.replace(load("p0", seq=2), is_accepting=False))
        case "full":
            pool.hear(structs.replace(load("p0", seq=2), capacity_requests=0))
        case "refused":
            pool.ledger.refused("p0", pool.now_s)
    assert {pool.route(route(10)) for _ in range(20)} == {"p1"}
    pool.hear(load("p0", seq=3))  # its own word that it does again
    assert pool.route(route(10)) == "p0"


def test_when_all_have_refused_all_are_asked_again() -> None:
    pool = Pool(load("p0"))
    pool.ledger.refused("p0", pool.now_s)
    assert pool.route() == "p0"


# Case 33


def test_case_33_a_new_replica_does_not_get_all_that_is_new() -> None:
    old = [load(f"p{i}", left_s=3.0, reservations=(90 + i,)) for i in range(3)]

    def share(is_new: bool, age_s: float) -> int:
        pool = Pool(*old, *([] if is_new else [load("new")]))
        if is_new:
            pool.hear(load("new"))
            pool.now_s += age_s
            pool.hear(*(structs.replace(one, seq=2) for one in [*old, load("new")]))
        return [pool.route() for _ in range(8)].count("new")

    assert share(is_new=True, age_s=0.0) < share(is_new=True, age_s=RAMP_S / 2) < share(is_new=False, age_s=0.0)
    assert share(is_new=True, age_s=RAMP_S) == share(is_new=False, age_s=0.0)


def test_case_33_when_all_are_new_it_makes_no_difference() -> None:
    pool = Pool()
    pool.hear(load("p0", left_s=9.0, reservations=(90,)), load("p1", left_s=1.0, reservations=(91,)))
    assert pool.route(route(20_000)) == "p1"
    pool.choose(route(deadline_ns=int((pool.now_s + 2.1) * SECOND)))  # nor is it refused for it


# Refusal


def test_what_would_be_done_too_late_is_refused_with_the_time_until_it_would_not() -> None:
    pool = Pool(load("p0", left_s=10.0, reservations=(90,)))
    now_ns = int(pool.now_s * SECOND)
    assert pool.choose(route(20_000, deadline_ns=now_ns + 30_100_000_000)).id == "p0"
    with pytest.raises(Full, match=r"wait 10\.0 s .* deadline") as refused:
        pool.choose(route(20_000, deadline_ns=now_ns + 26_000_000_000))
    assert refused.value.retry_after_s == pytest.approx(4.0)


def test_hopeless_queueing_is_refused_without_a_deadline() -> None:
    pool = Pool(load("p0", left_s=MAX_WAIT_S + 7.0, reservations=(90,)))
    with pytest.raises(Full) as refused:
        pool.choose(route(1_000_000))
    assert refused.value.retry_after_s == pytest.approx(7.0)
    pool.now_s += 7.1
    pool.hear(load("p0", seq=2, left_s=MAX_WAIT_S - 0.1, reservations=(90,)))
    assert pool.choose(route(1_000_000)).id == "p0"


def test_the_tenant_that_floods_is_refused_and_not_the_others() -> None:
    """Also by a balancer that has just started: reports say whose work there is."""
    pool = Pool(load("p0", left_s={"flood": 400.0, "t": 1.0}, reservations=tuple(range(100, 150))))
    soon = int((pool.now_s + 20.0) * SECOND)
    for deadline_ns in (0, soon):
        assert pool.choose(route(5000, deadline_ns=deadline_ns)).id == "p0"
        with pytest.raises(Full):
            pool.choose(structs.replace(route(5000, deadline_ns=deadline_ns), tenant="flood"))
    for number in range(60):  # what is on its way counts: now it floods too
        pool.ledger.reserve(1000 + number, pool.choose(route(1)), route(5000), pool.now_s)
    with pytest.raises(Full):
        pool.choose(route(5000))


def test_a_tenant_waits_for_as_much_of_each_other_as_it_takes_itself() -> None:
    pool = Pool(load("p0", left_s={"a": 200.0, "b": 200.0, "c": 0.0}, reservations=(90, 91)))
    with pytest.raises(Full) as refused:
        pool.choose(route(5000, deadline_ns=int((pool.now_s + 14.0) * SECOND)))
    assert refused.value.retry_after_s == pytest.approx(1.0)


def test_a_little_of_a_tenant_does_not_wait_for_much_of_its_own() -> None:
    one = load("p0", left_s=100.0, reservations=(90, 91, 92, 93), num_unfinished=1)  # three are handed over
    soon = int((OLD_S + 3.0) * SECOND)
    assert Pool(one).route(route(1000, deadline_ns=soon)) == "p0"
    with pytest.raises(Full):
        Pool(structs.replace(one, num_waiting=4)).choose(route(1000, deadline_ns=soon))


@pytest.mark.parametrize("left_s", [0.0, 50.0])
def test_what_alone_takes_longer_than_its_deadline_is_not_told_to_come_again(left_s: float) -> None:
    slow = dataclasses.replace(BY_TOKEN, token_ns=4e6)
    pool = Pool(load("p0", left_s=left_s, reservations=(90,)), load("p1", cost=slow))
    too_soon = r"computing it takes about 5\.0 s, its deadline leaves 0\.5 s"
    for at_s, why in ((pool.now_s - 1.0, "has passed"), (pool.now_s, "has passed"), (pool.now_s + 0.5, too_soon)):
        with pytest.raises(TooLate, match=why) as refused:
            pool.choose(route(5000, deadline_ns=int(at_s * SECOND)))
        assert refused.value.retry_after_s == 0.0


def test_what_the_fast_one_can_do_in_time_waits_for_that_one() -> None:
    """A slow replica that would be done first, and too late, is none to go by."""
    slow = dataclasses.replace(BY_TOKEN, token_ns=4e6)
    soon = int((OLD_S + 9.0) * SECOND)
    fast, idle = load("p0", left_s=50.0, reservations=(90, 91, 92, 93)), load("p1", cost=slow)
    with pytest.raises(Full, match="wait") as refused:
        Pool(fast, idle).choose(route(5000, deadline_ns=soon))
    assert not isinstance(refused.value, TooLate) and refused.value.retry_after_s > 0
    with pytest.raises(Full, match="in time are full") as refused:
        Pool(structs.replace(fast, capacity_requests=0), idle).choose(route(5000, deadline_ns=soon))
    assert not isinstance(refused.value, TooLate)


def test_before_it_is_refused_it_goes_where_its_tenant_has_the_least() -> None:
    mine = load("p0", left_s=200.0, reservations=tuple(range(100)))
    theirs = load("p1", left_s={"flood": 200.0}, reservations=tuple(range(100, 200)))
    pools = [Pool(mine, theirs, id=f"pb{number}") for number in range(8)]
    assert {pool.route(route(2000, deadline_ns=int((OLD_S + 10.0) * SECOND))) for pool in pools} == {"p1"}
