"""Which replica goes on with a computed prompt, and who waits: the policy, alone and with replicas that refuse."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from actors.balancers.choice import Full
from actors.balancers.decode import RoomiestInTurn
from actors.balancers.ledger import Ledger
from actors.balancers.turns import FORGOTTEN_S, NUM_FIRST, PLACED_S
from actors.decode.outputs import OutputLength
from actors.decode.slots import Generation, Slots
from actors.rules.load import DecodeLoad, expected_output, promised_tokens
from schemas.message import Role
from schemas.request import Cancelled
from schemas.routing import LoadReported, Route
from tests.actors.builders import hand_over, report

CAPACITY = 8192


def route(id: str, prompt: int, output: int, tenant: str = "", *, is_whole: bool = True) -> Route:
    return Route(request_id=id, num_cached=prompt, num_new=output, tenant=tenant, is_whole=is_whole)


class Rank:
    """A decode replica without an engine: what it promises, and what it reports."""

    def __init__(self, id: str, num_slots: int = 16, capacity: int = CAPACITY) -> None:
        self.id = id
        self.slots = Slots(num_slots, capacity, capacity)
        self._seq = count(1)

    def report(self) -> LoadReported:
        return structs.replace(
            report(self.id, seq=next(self._seq), reservations=[g.offer.reservation for g in self.slots]),
            role=Role.DECODE,
            num_tokens=self.slots.num_tokens,
            capacity_requests=self.slots.num_slots,
            capacity_tokens=self.slots.capacity_tokens,
            detail=self.slots.load().detail(),
        )

    def end(self, generation: Generation) -> None:
        generation.end = Cancelled()
        self.slots.leave(generation, 0.0)


class Balancer:
    """Policy and ledger, and how `place` uses them."""

    def __init__(self, ranks: list[Rank], number: int = 0) -> None:
        self.choice, self.ledger, self.now_s = RoomiestInTurn(), Ledger(), 0.0
        self.ranks = {rank.id: rank for rank in ranks}
        self.next_id = count(1 + (number << 20))
        self.num_refused = 0
        self.hear(*ranks)

    def hear(self, *ranks: Rank) -> None:
        for rank in ranks:
            self.ledger.report(rank.report(), self.now_s)

    def empty(self, rank: Rank) -> None:
        """All there end, and it says so."""
        for generation in rank.slots:
            rank.end(generation)
            self.ledger.release(generation.offer.reservation, self.now_s)
        self.hear(rank)

    def end(self, id: str) -> None:
        """One ends, and its replica says so."""
        for rank in self.ranks.values():
            for generation in [one for one in rank.slots if one.id == id]:
                rank.end(generation)
                self.ledger.release(generation.offer.reservation, self.now_s)
                self.hear(rank)

    def choose(self, wanted: Route) -> str:
        """Where it is sent, without going there. Raises Full."""
        return self.choice(self.ledger.eligible(wanted.excluded, self.now_s), wanted, self.now_s, 0).id

    def place(self, wanted: Route) -> str:
        """Where it went; "" if nowhere: then it waits."""
        while True:
            eligible = self.ledger.eligible(wanted.excluded, self.now_s)
            try:
                chosen = self.choice(eligible, wanted, self.now_s, 0) if eligible else None
            except Full:
                chosen = None
            if chosen is None:
                return ""
            reservation = next(self.next_id)
            self.ledger.reserve(reservation, chosen, wanted, self.now_s)
            offer = structs.replace(
                hand_over(wanted.request_id, wanted.num_cached, wanted.num_new),
                reservation=reservation,
                is_protected=wanted.is_whole,
            )
            if self.ranks[chosen.id].slots.arrive(offer) is not None:
                return chosen.id
            self.num_refused += 1
            self.ledger.release(reservation, self.now_s)
            wanted = structs.replace(wanted, excluded=[*wanted.excluded, chosen.id])


class TestChoice:
    def test_the_worse_of_slots_and_tokens_counts(self) -> None:
        balancer = Balancer([Rank("d0"), Rank("d1")])
        long, short = balancer.place(route("long", 7000, 10)), balancer.place(route("short", 10, 10))
        assert long != short
        placed = {balancer.place(route(f"r{i}", 10, 10)) for i in range(10)}
        assert placed == {short}
        assert {balancer.place(route(f"s{i}", 10, 10)) for i in range(4)} == {long, short}

    def test_what_is_expected_to_grow_counts_and_what_may_but_will_not_does_not(self) -> None:
        growing, grown = Rank("d0"), Rank("d1")
        for rank in (growing, grown):
            for _ in range(100):
                rank.slots.outputs.add(500)
        balancer = Balancer([growing, grown])
        for i in range(4):
            growing.slots.arrive(hand_over(f"a{i}", 100, 1800))
        grown.slots.arrive(hand_over("b", 1000, 10))  # holds more now
        balancer.hear(growing, grown)
        balancer = Balancer([growing, grown])
        assert growing.slots.num_tokens < grown.slots.num_tokens
        assert balancer.choose(route("r", 100, 100)) == "d1"

    def test_more_than_was_promised_is_no_choice_however_little_is_expected(self) -> None:
        balancer = Balancer([Rank("d0"), Rank("d1")])
        at = balancer.place(route("greedy", 100, CAPACITY - 100))  # 256 tokens are expected of it
        balancer.hear(*balancer.ranks.values())
        for i in range(8):
            assert balancer.place(route(f"r{i}", 1000, 10)) not in (at, "")
        with pytest.raises(Full, match="all 2 decode replicas are full"):
            balancer.choose(route("r", 1, 1000))

    def test_who_may_grow_comes_where_there_is_room_for_what_is_expected_and_a_block_for_each(self) -> None:
        rank = Rank("d0", capacity=2048)
        balancer = Balancer([rank])
        for _ in range(10):
            rank.slots.outputs.add(10)
        balancer.hear(rank)
        ids = [f"r{i}" for i in range(9)]  # a block for the prompt, one to grow into
        assert [bool(balancer.place(route(id, 100, 1000, is_whole=False))) for id in ids] == [*[True] * 8, False]
        for _ in range(200):
            rank.slots.outputs.add(500)
        balancer = Balancer([Rank("d1", capacity=2048)])
        balancer.ranks["d1"].slots.outputs.mean = rank.slots.outputs.mean
        balancer.hear(*balancer.ranks.values())
        assert [bool(balancer.place(route(id, 100, 1000, is_whole=False))) for id in ids[:4]] == [*[True] * 3, False]
        assert balancer.num_refused == 0

    def test_what_is_on_its_way_is_promised_in_whole_blocks_and_no_longer_than_the_engines_limit(self) -> None:
        rank = Rank("d0", capacity=1024)
        balancer = Balancer([rank])
        sent = [route(f"r{i}", 1, 129) for i in range(4)]
        for i, one in enumerate(sent):  # on their way: no report knows them
            balancer.ledger.reserve(i, balancer.ledger.eligible([], 0.0)[0], one, 0.0)
        with pytest.raises(Full):
            balancer.choose(route("r", 1, 1))
        assert Balancer([rank]).choose(route("r", 500, 10_000)) == "d0"

    def test_what_never_fits_is_told_so_and_delays_nobody(self) -> None:
        rank = Rank("d0", capacity=1024)
        rank.slots.max_tokens = 1 << 20
        balancer = Balancer([rank])
        for number in range(NUM_FIRST):
            with pytest.raises(Full, match="needs room for 2048 tokens, the largest decode replica has 1024"):
                balancer.choose(route(f"r{number}", 2000, 1))
        assert balancer.choose(route("s", 900, 1)) == "d0"
        with pytest.raises(Full, match="needs room for 1536 tokens"):
            balancer.choose(route("grows", 500, 1000, is_whole=False))
        assert rank.slots.arrive(hand_over("grows", 500, 1000)) is None

    def test_equals_are_told_apart_by_the_output_to_come_then_by_chance(self) -> None:
        ranks = [Rank(f"d{i}", num_slots=2) for i in range(4)]
        for rank, output in zip(ranks, (100, 50, 100, 100), strict=True):
            rank.slots.arrive(hand_over("r", 50, output))
        assert {Balancer(ranks).choose(route(f"r{i}", 1, 1)) for i in range(16)} == {"d1"}
        idle = [Rank(f"d{i}") for i in range(4)]
        assert len({Balancer(idle).choose(route(f"r{i}", 1, 1)) for i in range(32)}) == 4


class TestTurns:
    def test_room_is_for_who_asked_first_and_for_younger_ones_only_what_is_left(self) -> None:
        rank = Rank("d0", capacity=1024)
        balancer = Balancer([rank])
        assert balancer.place(route("running", 100, 700)) == "d0"
        assert balancer.place(route("first", 100, 300)) == ""  # wants 512, has 128
        assert balancer.place(route("small", 10, 10)) == ""  # the oldest needs all there is
        balancer.empty(rank)
        assert balancer.place(route("small", 10, 10)) == "d0"  # both fit now
        assert balancer.place(route("large", 500, 10)) == ""  # would take the first one's
        assert balancer.place(route("first", 100, 300)) == "d0"

    def test_the_oldest_keeps_one_replica_and_others_go_on(self) -> None:
        ranks = [Rank(f"d{i}", capacity=1024) for i in range(2)]
        balancer = Balancer(ranks)
        at = balancer.place(route("a", 100, 700))
        other = balancer.place(route("b", 100, 500))
        assert {at, other} == {"d0", "d1"}
        assert balancer.place(route("whole", 100, 900)) == ""
        assert balancer.place(route("small", 10, 10)) == at  # `other` has more room: it is kept for the whole
        balancer.now_s += FORGOTTEN_S
        assert balancer.place(route("whole", 100, 900)) == ""
        balancer.now_s += PLACED_S
        assert balancer.place(route("more", 10, 150)) == ""
        balancer.now_s += 0.1  # it has not asked again
        assert balancer.place(route("more", 10, 150)) == other

    def test_what_another_balancer_has_placed_keeps_nobody_waiting_and_who_asks_late_keeps_its_turn(self) -> None:
        rank = Rank("d0", num_slots=2)
        balancer = Balancer([rank])
        assert [balancer.place(route(id, 1, 1)) for id in ("r", "s", "first", "second")] == ["d0", "d0", "", ""]
        balancer.empty(rank)
        rank.slots.arrive(hand_over("first", 1, 1))
        balancer.hear(rank)
        assert balancer.place(route("second", 1, 1)) == ""
        balancer.now_s += PLACED_S + 0.1
        assert balancer.place(route("third", 1, 1)) == "d0"
        assert [balancer.place(route(id, 1, 1)) for id in ("second", "third")] == ["", ""]
        balancer.empty(rank)
        rank.slots.arrive(hand_over("strange", 1, 1))
        balancer.hear(rank)
        assert [balancer.place(route(id, 1, 1)) for id in ("third", "second")] == ["", "d0"]

    def test_each_of_the_oldest_keeps_a_replica_of_its_own(self) -> None:
        balancer = Balancer([Rank(f"d{i}", capacity=1024) for i in range(2)])
        for id in ("a", "b"):
            assert balancer.place(route(id, 100, 500))
        assert balancer.place(route("whole", 100, 900)) == ""
        assert balancer.place(route("another", 100, 900)) == ""
        assert balancer.place(route("small", 10, 10)) == ""

    def test_one_that_was_refused_comes_back_to_its_turn(self) -> None:
        rank = Rank("d0", num_slots=1)
        balancer = Balancer([rank])
        assert balancer.place(route("running", 1, 1)) == "d0"
        assert [balancer.place(route(id, 1, 1)) for id in ("first", "second")] == ["", ""]
        balancer.empty(rank)
        rank.slots.arrive(hand_over("strange", 1, 1))  # another balancer's
        assert balancer.place(route("first", 1, 1)) == "" and balancer.num_refused == 1
        balancer.hear(rank)
        assert balancer.place(route("first", 1, 1)) == "" and balancer.num_refused == 1
        balancer.empty(rank)
        assert balancer.place(route("second", 1, 1)) == "" and balancer.place(route("first", 1, 1)) == "d0"

    def test_those_far_behind_wait_for_all_before_them(self) -> None:
        rank = Rank("d0", num_slots=NUM_FIRST + 1)
        balancer = Balancer([rank])
        for i in range(NUM_FIRST + 1):
            balancer.place(route(f"running{i}", 1, 1))
        ids = [f"r{i}" for i in range(NUM_FIRST + 8)]
        assert {balancer.place(route(id, 1, 1)) for id in ids} == {""}
        balancer.empty(rank)
        assert [id for id in reversed(ids) if balancer.place(route(id, 1, 1))] == ids[NUM_FIRST - 1 :: -1]
        assert [id for id in reversed(ids) if balancer.place(route(id, 1, 1))] == [ids[NUM_FIRST]]


class TestTenants:
    """Of those that wait, the tenant that holds least is first."""

    def placed(self, balancer: Balancer, routes: list[Route]) -> list[str]:
        """Who of them got a place, when all ask one after the other."""
        return [one.request_id for one in routes if balancer.place(one)]

    def test_who_holds_little_waits_for_one_slot_and_who_floods_gets_the_rest_in_order(self) -> None:
        balancer = Balancer([Rank("d0", num_slots=4)])
        flood = [route(f"f{i}", 1, 1, "flood") for i in range(3 * NUM_FIRST)]
        assert self.placed(balancer, flood) == ["f0", "f1", "f2", "f3"]
        calm = [route(f"c{i}", 1, 1, "calm") for i in range(3)]
        assert self.placed(balancer, calm) == []
        order: list[str] = []
        for ended in ("f0", "f1", "f2"):
            balancer.end(ended)
            order += self.placed(balancer, [one for one in (*flood[4:], *calm) if one.request_id not in order])
        assert order == ["c0", "c1", "f4"]  # then both hold two, and the flood asked first
        balancer.end("c0")
        assert self.placed(balancer, [*flood[5:], calm[2]]) == ["c2"]
        for ended in ("c1", "c2", "f3", "f4"):
            balancer.end(ended)
        assert self.placed(balancer, flood[:4:-1]) == ["f8", "f7", "f6", "f5"]

    def test_tokens_count_as_slots_do_and_no_more_of_them_than_the_engine_takes(self) -> None:
        rank = Rank("d0", num_slots=8, capacity=1024)
        balancer = Balancer([rank])
        assert balancer.place(route("whole", 400, 400, "long"))
        assert self.placed(balancer, [route(f"s{i}", 1, 1, "short") for i in range(2)]) == ["s0"]
        assert balancer.place(route("more", 1, 1, "long")) == ""
        balancer.end("s0")
        assert self.placed(balancer, [route("more", 1, 1, "long"), route("s1", 1, 1, "short")]) == ["s1"]
        rank.slots.max_tokens = 128
        balancer = Balancer([rank])
        balancer.empty(rank)
        assert balancer.place(route("endless", 1, 100_000, "one"))
        two = [route(f"t{i}", 1, 1, "two") for i in range(9)]
        assert len(self.placed(balancer, two)) == 7
        assert balancer.place(route("next", 1, 1, "one")) == ""
        balancer.end("t0")
        assert self.placed(balancer, [*two[7:], route("next", 1, 1, "one")]) == ["next"]

    def test_nobody_is_passed_for_ever(self) -> None:
        """Its own tenant's keep it behind those that hold nothing, which take the room it needs."""
        balancer = Balancer([Rank(f"d{i}", num_slots=8, capacity=1024) for i in range(2)])
        assert {balancer.place(route(f"own{i}", 100, 500, "large")) for i in range(2)} == {"d0", "d1"}
        whole, running, num_passed = route("whole", 100, 900, "large"), "own1", 0
        assert balancer.place(whole) == ""
        balancer.end("own1")
        others = [route(f"r{i}", 100, 400, f"tenant{i}") for i in range(40)]
        for other in others:
            num_passed += balancer.place(other) != ""
            balancer.end(running)
            running = other.request_id
            balancer.now_s += 0.1
            if balancer.place(whole):
                break
        assert num_passed == 16

    def test_who_starts_again_knows_no_shares_and_goes_by_age(self) -> None:
        rank = Rank("d0", num_slots=2)
        before = Balancer([rank])
        assert len(self.placed(before, [route(f"f{i}", 1, 1, "flood") for i in range(3)])) == 2
        balancer = Balancer([rank], number=1)
        waiting = [route("f2", 1, 1, "flood"), route("c0", 1, 1, "calm")]
        assert self.placed(balancer, waiting) == []
        balancer.end("f0")
        assert self.placed(balancer, waiting[::-1]) == ["f2"]


def test_the_usual_length_of_outputs_is_learnt_and_one_that_runs_away_moves_it_little() -> None:
    length = OutputLength()
    length.add(100)
    assert length.mean == 100
    for _ in range(400):
        length.add(100)
    length.add(1_000_000)
    assert 100 < length.mean < 106
    for _ in range(600):
        length.add(400)
    assert 390 < length.mean <= 400


def test_what_is_expected_is_no_more_than_what_may_come() -> None:
    assert (expected_output(500.0, 20), expected_output(500.0, 800), expected_output(0.0, 800)) == (20, 500, 256)
    assert (promised_tokens(1), promised_tokens(128), promised_tokens(129), promised_tokens(5000, 1000)) == (
        *(128, 128, 256),
        1024,
    )


def test_a_replica_reports_what_it_promised_and_expects() -> None:
    slots = Slots(4, CAPACITY, max_tokens=1000)
    slots.outputs.add(50)
    for id, prompt, output in (("a", 100, 300), ("b", 10, 5), ("c", 900, 500)):
        assert slots.arrive(hand_over(id, prompt, output)) is not None
    assert slots.load() == DecodeLoad(256 + 128 + 1024, 50.0, 1000.0, (100 + 50) + (10 + 5) + (900 + 50))
    *_, last = slots
    last.end = Cancelled()
    assert slots.load().reserved_tokens == 256 + 128 + 1024  # until it has left
    slots.leave(last, 0.0)
    assert slots.load().reserved_tokens == 256 + 128


# From tens to thousands: skewed by a factor of 100 and more.
LENGTHS = st.sampled_from((20, 40, 150, 400, 2000, 4000))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=8, max_size=120))
def test_however_lengths_are_skewed_no_replica_is_further_above_the_mean_than_one_request(
    arrivals: list[tuple[int, int]],
) -> None:
    ranks = [Rank(f"d{i}", num_slots=1000, capacity=1 << 20) for i in range(8)]
    balancer = Balancer(ranks)
    largest = 0.0
    for i, (prompt, output) in enumerate(arrivals):
        assert balancer.place(route(f"r{i}", prompt, output))
        largest = max(largest, (prompt + expected_output(0.0, output)) / (1 << 20), 1 / 1000)
        balancer.hear(ranks[i % 8])  # the others' reports are late
    shares = [max(r.slots.load().expected_tokens / (1 << 20), len(r.slots) / 1000) for r in ranks]
    assert max(shares) <= sum(shares) / 8 + largest + 1e-12
    assert balancer.num_refused == 0


EVENTS = st.one_of(
    st.tuples(st.just("arrive"), LENGTHS, LENGTHS),
    st.tuples(st.just("arrive"), LENGTHS, LENGTHS),
    st.tuples(st.just("end"), st.integers(0, 7), st.integers(0, 15)),
    st.tuples(st.just("report"), st.integers(0, 7), st.integers(0, 3)),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2), st.lists(EVENTS, max_size=150))
def test_no_replica_promises_more_than_it_has_and_every_request_has_one_owner(
    num_balancers: int, events: list[tuple[str, int, int]]
) -> None:
    """Reports are lost or late, releases reach only who made the reservation, balancers know nothing of each other."""
    ranks = [Rank(f"d{i}") for i in range(8)]
    balancers = [Balancer(ranks, number) for number in range(num_balancers)]
    waiting: dict[str, Route] = {}
    placed: dict[str, str] = {}
    for i, (kind, first, second) in enumerate(events):
        match kind:
            case "arrive":
                waiting[f"r{i}"] = route(f"r{i}", first, second, is_whole=first > second)
            case "end":
                for generation in list(ranks[first].slots)[second : second + 1]:
                    ranks[first].end(generation)
                    assert placed.pop(generation.id) == ranks[first].id
                    for balancer in balancers:
                        balancer.ledger.release(generation.offer.reservation, 0.0)
            case "report":
                for number, balancer in enumerate(balancers):
                    if second >> number & 1:
                        balancer.hear(ranks[first])
        for id, wanted in list(waiting.items()):
            if at := balancers[i % num_balancers].place(wanted):
                placed[id] = at
                del waiting[id]
        for rank in ranks:
            assert rank.slots.promised_tokens <= CAPACITY and len(rank.slots) <= 16
    owners = Counter(generation.id for rank in ranks for generation in rank.slots)
    assert owners == Counter(placed.keys())
    if num_balancers == 1:
        assert balancers[0].num_refused == 0
