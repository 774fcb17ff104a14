"""Ledger and policies."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs

from actors.balancers.choice import Full
from actors.balancers.ledger import FORGET_S, SETTLE_S, Ledger, Replica
from actors.balancers.prefill import ComputeQuota
from actors.rules.owner import EXPIRY_S
from schemas.routing import Route
from tests.actors.builders import report

WORK = Route(request_id="r", num_new=1)


def replica(ledger: Ledger, id: str) -> Replica:
    return next(r for r in ledger.eligible([], 0.0) if r.id == id)


class TestLedger:
    def test_a_reservation_counts_at_once_and_once_only(self) -> None:
        ledger = Ledger()
        ledger.report(report("p0"), 0.0)
        ledger.reserve(11, replica(ledger, "p0"), Route(request_id="r", num_new=100), 0.0)
        assert replica(ledger, "p0").num_requests == 1
        assert [held.route.num_new for held in replica(ledger, "p0").on_the_way()] == [100]
        ledger.report(report("p0", seq=2, reservations=[11]), 0.1)
        assert replica(ledger, "p0").num_requests == 1
        assert ledger.release(11, 0.2) and not ledger.release(11, 0.2)
        assert replica(ledger, "p0").num_requests == 0

    def test_the_replicas_word_wins_over_a_lost_release(self) -> None:
        ledger = Ledger()
        ledger.report(report("p0"), 0.0)
        ledger.reserve(11, replica(ledger, "p0"), Route(request_id="r", num_new=1), 0.0)
        ledger.report(report("p0", seq=2), SETTLE_S - EXPIRY_S + 0.5)
        ledger.report(report("p0", seq=3), SETTLE_S)
        assert ledger.num_reserved == 1
        ledger.report(report("p0", seq=4), SETTLE_S + 0.1)
        assert ledger.num_reserved == 0

    def test_late_reports_are_ignored_and_a_restart_clears(self) -> None:
        ledger = Ledger()
        ledger.report(report("p0", seq=5, reservations=[1, 2]), 0.0)
        ledger.report(report("p0", seq=4), 0.1)
        assert replica(ledger, "p0").num_requests == 2
        ledger.reserve(3, replica(ledger, "p0"), Route(request_id="r", num_new=1), 0.1)
        ledger.report(report("p0", seq=1, incarnation="b"), 0.2)
        assert replica(ledger, "p0").num_requests == 0 and ledger.num_reserved == 0

    def test_not_eligible_when_silent_excluded_or_draining(self) -> None:
        ledger = Ledger()
        ledger.report(report("p0"), 0.0)
        assert ledger.eligible(["p0"], 0.0) == []
        ledger.report(structs.replace(report("p1"), is_accepting=False), 0.0)
        assert [r.id for r in ledger.eligible([], EXPIRY_S - 0.1)] == ["p0"]
        for seq, now_s in ((2, EXPIRY_S / 2), (3, EXPIRY_S)):
            ledger.report(structs.replace(report("p1", seq=seq), is_accepting=False), now_s)
        assert ledger.eligible([], EXPIRY_S) == []

    def test_a_replica_silent_for_long_is_lost_with_its_reservations(self) -> None:
        ledger = Ledger()
        ledger.report(report("p0"), 0.0)
        ledger.reserve(1, replica(ledger, "p0"), Route(request_id="r", num_new=1), 0.0)
        for seq in range(1, int(FORGET_S)):
            ledger.report(report("p1", seq=seq), seq)
        assert ledger.num_reserved == 1
        ledger.report(report("p1", seq=100), FORGET_S)
        assert ledger.num_reserved == 0 and ledger.num_replicas == 1

    def test_reservations_another_balancer_made_are_seen(self) -> None:
        ledger = Ledger()
        ledger.report(report("p0", reservations=[90, 91]), 0.0)
        ledger.report(report("p1"), 0.0)
        chosen = ComputeQuota("pb0")(ledger.eligible([], 0.0), WORK, 0.0, 0)
        assert chosen.id == "p1"


class TestChoice:
    def test_a_burst_between_two_reports_is_spread(self) -> None:
        ledger = Ledger()
        for id in ("p0", "p1", "p2"):
            ledger.report(report(id), 0.0)
        for reservation in range(9):
            chosen = ComputeQuota("pb0")(ledger.eligible([], 0.0), WORK, 0.0, 0)
            ledger.reserve(reservation, chosen, WORK, 0.0)
        assert [r.num_requests for r in ledger.eligible([], 0.0)] == [3, 3, 3]

    def test_full_replicas_are_no_choice(self) -> None:
        ledger = Ledger()
        ledger.report(report("p0", reservations=[1, 2, 3, 4]), 0.0)
        with pytest.raises(Full):
            ComputeQuota("pb0")(ledger.eligible([], 0.0), WORK, 0.0, 0)


class Releases(RuleBasedStateMachine):
    """Whatever is routed, released and reported, no reservation is counted twice or kept for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now_s, self.seq, self.next_id = 0.0, 0, 0
        self.live: set[int] = set()

    @rule()
    def route(self) -> None:
        eligible = [replica for replica in self.ledger.eligible([], self.now_s) if not replica.is_full]
        if eligible:
            self.next_id += 1
            self.ledger.reserve(self.next_id, ComputeQuota("pb0")(eligible, WORK, self.now_s, 0), WORK, self.now_s)
            self.live.add(self.next_id)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            reservation = data.draw(st.sampled_from(sorted(self.live)))
            assert self.ledger.release(reservation, self.now_s)
            self.live.discard(reservation)
            assert not self.ledger.release(reservation, self.now_s)

    @rule(id=st.sampled_from(["p0", "p1"]), data=st.data())
    def hear(self, id: str, data: st.DataObject) -> None:
        self.seq += 1
        known = data.draw(st.sets(st.sampled_from(sorted(self.live)))) if self.live else set()
        self.ledger.report(report(id, seq=self.seq, reservations=sorted(known)), self.now_s)
        self.live &= set(self.ledger._holder)

    @rule(id=st.sampled_from(["p0", "p1"]))
    def lose(self, id: str) -> None:
        self.ledger.lost(id)
        self.live &= set(self.ledger._holder)

    @rule(step=st.floats(0.1, 5.0))
    def wait(self, step: float) -> None:
        self.now_s += step

    @invariant()
    def holders_and_replicas_agree(self) -> None:
        reserved = [id for r in self.ledger._replicas.values() for id in r.reserved]
        assert sorted(reserved) == sorted(self.ledger._holder) == sorted(self.live)


TestReleases = Releases.TestCase
