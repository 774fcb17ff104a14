"""What a balancer's ledger knows of time: what is outstanding, and since when it has heard of whom."""

from __future__ import annotations

import dataclasses
import random

import pytest
from msgspec import structs

from actors.balancers.ledger import FORGET_S, LEASE_FACTOR, LEASE_S, Ledger
from actors.rules.cost import PUBLISHED
from actors.rules.load import DecodeLoad, PrefillLoad
from actors.rules.owner import EXPIRY_S
from schemas.message import Role
from tests.actors.builders import report
from tests.actors.pools import BY_TOKEN, OLD_S, SECOND, Pool, load, route


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, 1e300])
def test_nonsense_in_a_report_is_taken_for_not_said(nonsense: float) -> None:
    said = dict.fromkeys(load("p0").detail | {"remaining_ns:t": 0.0}, nonsense)
    assert PrefillLoad.of(said) == PrefillLoad({}, PUBLISHED)
    assert Pool(structs.replace(load("p0"), detail=said), load("p1", left_s=9.0, reservations=(90,))).route() == "p0"
    assert DecodeLoad.of({"max_tokens": nonsense, "mean_output": 7.0}) == DecodeLoad(mean_output=7.0)


def test_half_of_the_coefficients_are_none() -> None:
    said = {name: number for name, number in load("p0", left_s=1.0).detail.items() if name != "cost_pair_ns"}
    assert PrefillLoad.of(said) == PrefillLoad({"t": SECOND}, PUBLISHED)


def test_an_exact_request_is_known_to_take_longer() -> None:
    pool = Pool(load("p0", cost=dataclasses.replace(BY_TOKEN, tail_token_ns=1e6)))
    pool.route(route(10_000, is_exact=True))
    assert pool.left_s("p0") == pytest.approx(20.0)


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
