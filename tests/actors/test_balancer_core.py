"""Ledger and policies."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs

from actors.balancers.choice import Full
from actors.balancers.ledger import FORGET_S, SETTLE_S, Ledger, Replica
from actors.balancers.prefill import ComputeQuota
from actors.rules.load import PrefillLoad
from actors.rules.owner import EXPIRY_S
from schemas.routing import LoadReported, Route
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
    """Whatever is routed, lost, released, reported late or not at all: no reservation is counted twice or for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now_s, self.next_id = 0.0, 0
        self.made: dict[int, tuple[str, float]] = {}
        self.held: dict[str, set[int]] = {"p0": set(), "p1": set()}
        self.seqs, self.incarnations = {"p0": 0, "p1": 0}, {"p0": 0, "p1": 0}
        self.on_the_wire: list[LoadReported] = []
        for id in self.held:
            self.say(id)
            self.hear()

    def say(self, id: str) -> None:
        self.seqs[id] += 1
        held, incarnation = sorted(self.held[id]), str(self.incarnations[id])
        said = report(id, seq=self.seqs[id], incarnation=incarnation, reservations=held)
        detail = PrefillLoad({"t": 1e9 * len(held)}).detail()
        self.on_the_wire.append(structs.replace(said, num_waiting=len(held), capacity_requests=8, detail=detail))

    def hear(self) -> None:
        self.ledger.report(self.on_the_wire.pop(), self.now_s)

    @rule(num_new=st.integers(1, 100_000), is_lost=st.booleans())
    def route(self, num_new: int, is_lost: bool) -> None:
        wanted = Route(request_id="r", num_new=num_new, tenant="t")
        open_ones = [one for one in self.ledger.eligible([], self.now_s) if not one.is_full]
        if open_ones:
            self.next_id += 1
            chosen = ComputeQuota("pb0")(open_ones, wanted, self.now_s, 0)
            self.ledger.reserve(self.next_id, chosen, wanted, self.now_s)
            self.made[self.next_id] = chosen.id, self.now_s
            if not is_lost:
                self.held[chosen.id].add(self.next_id)

    @rule(data=st.data(), is_lost=st.booleans())
    def end(self, data: st.DataObject, is_lost: bool) -> None:
        if self.made:
            reservation = data.draw(st.sampled_from(sorted(self.made)))
            for held in self.held.values():
                held.discard(reservation)
            if not is_lost:
                was_held = reservation in self.ledger._holder
                assert self.ledger.release(reservation, self.now_s) == was_held
                assert not self.ledger.release(reservation, self.now_s)

    @rule(id=st.sampled_from(["p0", "p1"]), is_late=st.booleans())
    def report(self, id: str, is_late: bool) -> None:
        self.say(id)
        if not is_late:
            self.hear()

    @rule(data=st.data())
    def hear_late(self, data: st.DataObject) -> None:
        if self.on_the_wire:
            said = self.on_the_wire.pop(data.draw(st.integers(0, len(self.on_the_wire) - 1)))
            if said.incarnation == str(self.incarnations[said.id]):  # one connection is in order
                self.ledger.report(said, self.now_s)

    @rule(id=st.sampled_from(["p0", "p1"]), is_seen=st.booleans())
    def restart(self, id: str, is_seen: bool) -> None:
        self.held[id], self.seqs[id] = set(), 0
        self.incarnations[id] += 1
        if is_seen:
            self.ledger.lost(id)

    @rule(step=st.sampled_from([0.1, 2.0, EXPIRY_S, FORGET_S, 10 * FORGET_S]))
    def wait(self, step: float) -> None:
        self.now_s += step

    @invariant()
    def what_is_counted_adds_up(self) -> None:
        reserved = [id for one in self.ledger._replicas.values() for id in one.reserved]
        assert sorted(reserved) == sorted(self.ledger._holder)
        for one in self.ledger._replicas.values():
            assert one.coming.keys() == one.reserved.keys() - one.reported
            assert one.num_requests == len(one.reserved.keys() | one.reported)
            assert one.coming_ns == pytest.approx(sum(held.ns for held in one.coming.values()), abs=1.0)
            assert one.left_s(self.now_s) >= 0

    @invariant()
    def what_was_heard_once_is_not_kept_for_ever(self) -> None:
        """Once all have reported again, and again when all is settled, what is kept is what they hold."""
        ledger = copy.deepcopy(self.ledger)
        for seq, now_s in ((100, self.now_s), (101, self.now_s + SETTLE_S + 0.1)):
            for id, held in self.held.items():
                said = report(id, seq=seq, incarnation=str(self.incarnations[id]), reservations=sorted(held))
                ledger.report(said, now_s)
        assert set(ledger._holder) <= self.held["p0"] | self.held["p1"]

    @invariant()
    def without_any_report_leases_end(self) -> None:
        ledger = copy.deepcopy(self.ledger)
        ledger.eligible([], self.now_s + 1e6)
        assert not ledger._holder


Releases.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestReleases = Releases.TestCase
