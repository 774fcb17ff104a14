"""The prefill balancer's policy, and what its ledger knows of time."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from msgspec import structs

from actors.balancers.choice import Full
from actors.balancers.ledger import FORGET_S, LEASE_FACTOR, LEASE_S, Ledger, Replica
from actors.balancers.prefill import MAX_WAIT_S, RAMP_S, ComputeQuota
from actors.rules.cost import PUBLISHED, Cost, Work
from actors.rules.load import PrefillLoad
from actors.rules.owner import EXPIRY_S
from schemas.message import Role
from schemas.routing import LoadReported, Route
from tests.actors.builders import report

SECOND = 1e9
BY_TOKEN = Cost(step_ns=0.0, token_ns=1e6, pair_ns=0.0, block_ns=0.0)
"""A thousand tokens take a second."""

OLD_S = 100.0
"""Replicas are not new any more."""


def load(
    id: str,
    seq: int = 1,
    *,
    left_s: float | dict[str, float] = 0.0,
    cost: Cost = BY_TOKEN,
    reservations: tuple[int, ...] = (),
    num_unfinished: int | None = None,
    incarnation: str = "a",
) -> LoadReported:
    by_tenant = left_s if isinstance(left_s, dict) else {"t": left_s}
    said = PrefillLoad({tenant: left * SECOND for tenant, left in by_tenant.items()}, cost)
    return structs.replace(
        report(id, seq=seq, incarnation=incarnation),
        reservations=list(reservations),
        num_waiting=len(reservations) if num_unfinished is None else num_unfinished,
        detail=said.detail(),
        capacity_requests=1000,
    )


def route(num_new: int = 1000, **fields: object) -> Route:
    return Route(request_id="r", num_new=num_new, tenant="t", **fields)  # type: ignore[arg-type]


class Pool:
    """A balancer's ledger and policy, and a clock. Its replicas are not new."""

    def __init__(self, *reports: LoadReported, id: str = "pb0") -> None:
        self.ledger, self.choice = Ledger(), ComputeQuota(id)
        self.now_s, self.num_routed = 0.0, 0
        for one in reports:
            self.ledger.report(structs.replace(one, seq=0), self.now_s)
        self.now_s = OLD_S
        for one in reports:
            self.ledger.report(one, self.now_s)

    def hear(self, *reports: LoadReported) -> None:
        for one in reports:
            self.ledger.report(one, self.now_s)

    def choose(self, wanted: Route) -> Replica:
        return self.choice(self.ledger.eligible(wanted.excluded, self.now_s), wanted, self.now_s, int(self.now_s * 1e9))

    def route(self, wanted: Route | None = None) -> str:
        chosen = self.choose(wanted or route())
        self.num_routed += 1
        self.ledger.reserve(self.num_routed, chosen, wanted or route(), self.now_s)
        return chosen.id

    def left_s(self, id: str) -> float:
        return self.ledger._replicas[id].left_s(self.now_s)


# The choice


def test_the_least_of_outstanding_and_cost_in_the_replicas_own_time() -> None:
    slow = dataclasses.replace(BY_TOKEN, token_ns=4e6)
    busy, idle = load("p0", left_s=1.0, reservations=(90,)), load("p1", cost=slow)
    assert Pool(busy, idle).route() == "p0"  # done in 2 s, there in 4
    assert Pool(load("p0", left_s=7.0, reservations=(90,)), idle).route(route(4000)) == "p0"  # 11, there 16
    many = load("p0", left_s=60.0, reservations=(90, 91, 92, 93))
    assert Pool(many, idle).route(route(4000)) == "p1"  # each of them as long as it is itself, and a step


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


# What the ledger knows of time


def test_outstanding_is_what_was_reported_less_the_time_since_and_what_was_reserved() -> None:
    pool = Pool(load("p0", left_s=5.0, reservations=(90,)))
    pool.route(route(2000))
    assert pool.left_s("p0") == pytest.approx(7.0)
    pool.now_s += 3.0
    assert pool.left_s("p0") == pytest.approx(4.0)
    pool.hear(load("p0", seq=2, left_s=6.0, reservations=(90, 1)))  # slower than it says; it knows ours
    assert pool.left_s("p0") == pytest.approx(6.0)
    pool.now_s += 60.0
    assert pool.left_s("p0") == 0.0


def test_what_ends_sooner_than_it_can_be_done_was_not_done() -> None:
    pool = Pool(load("p0", left_s=5.0, reservations=(90,)))
    pool.route(route(20_000))
    pool.now_s += 1.0
    assert pool.ledger.release(1, pool.now_s)  # refused, or cancelled
    assert pool.left_s("p0") == pytest.approx(5.0)
    pool.route(route(2000))
    pool.now_s += 3.0
    assert pool.ledger.release(2, pool.now_s)  # done, before the others
    assert pool.left_s("p0") == pytest.approx(4.0)


def test_a_replica_without_requests_has_no_work() -> None:
    pool = Pool(load("p0"))
    pool.route(route(1000))
    pool.hear(load("p0", seq=2, left_s=30.0, reservations=(1,)))
    pool.now_s += 2.0  # it was faster than it thought
    assert pool.ledger.release(1, pool.now_s) and pool.left_s("p0") == 0.0


def test_a_release_that_was_lost_is_over_when_its_replica_does_not_list_it_any_more() -> None:
    pool = Pool(load("p0"))
    pool.route()
    pool.hear(load("p0", seq=2, left_s=1.0, reservations=(1,)))
    pool.now_s += 1.0
    pool.hear(load("p0", seq=3))
    assert pool.ledger.num_reserved == 0 and pool.left_s("p0") == 0.0


# Cases 26 and 38


def test_case_26_flapping_keeps_the_counters() -> None:
    pool = Pool(load("p0"), load("p1"))
    pool.ledger.reserve(1, pool.ledger._replicas["p0"], route(30_000), pool.now_s)
    pool.ledger.reserve(2, pool.ledger._replicas["p0"], route(30_000), pool.now_s)
    for seq in range(2, 22, 4):
        said = load("p0", seq=seq, left_s=60.0, reservations=(1, 2))
        for number in range(3):  # a storm of reports, among them late ones
            pool.hear(structs.replace(said, seq=seq + number, is_accepting=number != 1), load("p0"), said)
        for number in range(4):  # and silence, while the other is heard
            pool.now_s += EXPIRY_S / 3
            pool.hear(load("p1", seq=seq + number))
        assert {pool.choose(route(1)).id} == {"p1"}
    pool.hear(load("p0", seq=99, left_s=60.0, reservations=(1, 2)))
    assert pool.ledger.num_reserved == 2 and pool.left_s("p0") == pytest.approx(60.0)
    assert pool.ledger._replicas["p0"].since_s == 0.0  # nor is it new
    assert pool.ledger.release(1, pool.now_s) and pool.ledger._replicas["p0"].num_requests == 1


def test_case_38_the_silent_are_passed_over_while_others_report_and_used_when_nobody_does() -> None:
    pool = Pool(load("p0"), load("p1"))
    pool.now_s += EXPIRY_S
    assert pool.ledger.is_frozen(pool.now_s)
    assert {pool.route() for _ in range(8)} == {"p0", "p1"}
    pool.hear(load("p1", seq=2))
    assert not pool.ledger.is_frozen(pool.now_s)
    assert {pool.route() for _ in range(8)} == {"p0", "p1"}  # it will be heard any moment
    for seq in (3, 4):
        pool.now_s += EXPIRY_S / 2
        pool.hear(load("p1", seq=seq, left_s=20.0, reservations=(90,)))
    assert {pool.route() for _ in range(8)} == {"p1"}
    pool.hear(load("p0", seq=2))
    assert pool.route() == "p0"


def test_case_38_a_feed_that_goes_on_after_long_makes_nobody_new() -> None:
    pool = Pool(load("p0"), load("p1"))
    pool.route()
    pool.now_s += 3 * FORGET_S
    pool.hear(load("p0", seq=2, left_s=1.0, reservations=(1,)), load("p1", seq=2))
    assert pool.ledger.num_replicas == 2 and pool.ledger._replicas["p1"].since_s == 0.0


def test_case_38_four_balancers_without_reports_stay_balanced() -> None:
    """Each sees its own quarter only: what is not released tells it who is behind. One replica is slow."""
    pools = [Pool(*(load(f"p{i}") for i in range(4)), id=f"pb{n}") for n in range(4)]
    speeds = {"p0": 0.5, "p1": 1.0, "p2": 1.0, "p3": 1.0}
    free_s = dict.fromkeys(speeds, OLD_S)
    ends: list[tuple[float, int, Pool]] = []
    chance, now_s, waits = random.Random(3), OLD_S + EXPIRY_S, []
    for number in range(2000):
        now_s += 1.0 / (0.85 * 3.5)  # 85 % of what they can do
        for end in sorted(end for end in ends if end[0] <= now_s):
            assert end[2].ledger.release(end[1], end[0])
        ends = [end for end in ends if end[0] > now_s]
        pool = pools[number % 4]
        pool.now_s = now_s
        wanted = route(int(chance.expovariate(1 / 1000)) + 1)
        id = pool.route(wanted)
        free_s[id] = max(free_s[id], now_s) + wanted.num_new / 1000 / speeds[id]
        waits.append(free_s[id] - now_s)
        ends.append((free_s[id], pool.num_routed, pool))
    waits.sort()
    assert waits[int(0.99 * len(waits))] < 30.0, waits[-1]


def test_case_38_a_lost_release_is_over_after_a_lease_in_proportion_to_the_work() -> None:
    pool = Pool(load("p0"))
    pool.route(route(10_000))
    pool.now_s += LEASE_S + LEASE_FACTOR * 10.0 - 0.1
    pool.ledger.eligible([], pool.now_s)
    assert pool.ledger.num_reserved == 1
    pool.now_s += 0.2
    pool.ledger.eligible([], pool.now_s)
    assert pool.ledger.num_reserved == 0 and not pool.ledger.release(1, pool.now_s)


def test_case_38_what_takes_nobody_knows_how_long_has_no_lease() -> None:
    ledger = Ledger()
    ledger.report(structs.replace(report("d0"), role=Role.DECODE), 0.0)
    ledger.reserve(1, ledger.eligible([], 0.0)[0], route(), 0.0)
    ledger.eligible([], 1e6)
    assert ledger.release(1, 1e6)
