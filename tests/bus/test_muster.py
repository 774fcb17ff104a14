"""Who meets whom: however ranks come and go and words are lost, those that are there end up in one group."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.muster import AGAIN_S, FIRST_S, FRESH_S, GIVE_UP_S, Muster, News
from schemas.experts import MeetRanks, RankPresent

IDS = ("d-0", "d-1", "d-2")
TICK_S, MEET_S = 0.25, 10.0


def present(id: str, generation: int, *, is_waiting: bool = True, life: int = 1) -> RankPresent:
    return RankPresent(id=id, life=life, generation=generation, is_waiting=is_waiting)


def met(id: str, *members: str, generation: int = 5, least: int = 1) -> Muster:
    muster = Muster(IDS, id, 1, least)
    muster.wait(0.0)
    muster.met(MeetRanks(generation=generation, ids=list(members), lives=[1] * len(members), address=""))
    return muster


def test_the_first_meeting_waits_for_all_and_goes_on_without_who_does_not_come() -> None:
    muster = Muster(IDS, "d-0", 1, 2)
    assert muster.hear(present("d-2", 9, is_waiting=False), 0.0) is News.NOTHING  # it loads its weights yet
    muster.wait(0.0)
    assert muster.convene(0.1) == []
    muster.hear(present("d-2", 0), 1.0)
    assert muster.convene(1.0) == [] and muster.convene(FIRST_S - 0.1) == []
    muster.hear(present("d-1", 0), 1.1)
    assert muster.convene(1.2) == ["d-0", "d-1", "d-2"]
    assert muster.convene(1.2 + FRESH_S) == []  # they say so no longer
    muster.hear(present("d-2", 0), FIRST_S)
    assert muster.convene(FIRST_S) == ["d-0", "d-2"]
    muster.hear(present("d-2", 0, life=2), FIRST_S)
    muster.hear(present("d-2", 0, life=1), FIRST_S)  # late
    call = muster.call(["d-0", "d-2"], FIRST_S, 75, "here")
    assert (call.generation, call.lives) == (75, [1, 2])
    assert muster.call(["d-0"], FIRST_S, 75, "").generation > 75  # as clocks may stand still


def test_two_that_lead_at_the_same_moment_are_of_two_generations() -> None:
    """Each would take the other's group for its own, and neither would give way."""
    led = {met(id, *IDS).call([id], FIRST_S, clock_ns, "").generation: id for id in IDS for clock_ns in (75, 77)}
    assert len(led) == 6


def test_who_was_in_the_latest_generation_leads_and_waits_for_its_members_that_may_come() -> None:
    muster = met("d-1", "d-1", "d-2")
    muster.wait(10.0)
    muster.hear(present("d-0", 4), 10.0)
    assert muster.convene(10.1) == []
    assert muster.lose("d-2") is False  # it waits already
    assert muster.convene(10.1) == ["d-1", "d-0"]
    cold = Muster(IDS, "d-0", 1, 1)
    cold.wait(0.0)
    cold.hear(present("d-1", 5), 10.0)
    assert cold.convene(10.1) == []
    muster.hear(present("d-2", 5), 10.2)
    assert muster.convene(10.2) == ["d-1", "d-0", "d-2"]
    again = Muster(IDS, "d-1", 1, 1)
    again.wait(10.0)
    again.hear(present("d-2", 0), 10.0)
    again.met(MeetRanks(generation=6, ids=["d-1", "d-2"], lives=[1, 1], address=""))
    again.wait(10.1)
    assert again.convene(10.2) == []  # it waited before they met
    alone = met("d-1", "d-0", "d-1")
    alone.wait(10.0)
    assert alone.convene(9.9 + AGAIN_S) == [] and alone.convene(10.0 + AGAIN_S) == ["d-1"]


def test_too_few_do_not_meet_and_give_up() -> None:
    muster = met("d-0", "d-0", "d-1", least=2)
    muster.wait(10.0)
    muster.lose("d-1")
    assert muster.convene(10 + GIVE_UP_S) == [] and not muster.is_hopeless(10 + GIVE_UP_S)
    assert muster.is_hopeless(10.1 + GIVE_UP_S)
    muster.hear(present("d-2", 0), 10.0 + GIVE_UP_S)
    assert not muster.is_hopeless(10.1 + GIVE_UP_S) and muster.convene(10.1 + GIVE_UP_S) == ["d-0", "d-2"]


@pytest.mark.parametrize(
    ("word", "news"),
    [
        (present("d-1", 4), News.NOTHING),  # said before the meeting
        (present("d-1", 5), News.BROKEN),
        (present("d-1", 0, life=2), News.BROKEN),
        (present("d-2", 0), News.GROWS),
        (present("d-2", 9, is_waiting=False), News.BROKEN),
        (present("d-2", 4, is_waiting=False), News.NOTHING),
        (present("d-9", 0), News.NOTHING),
        (present("d-0", 9), News.NOTHING),
    ],
)
def test_what_a_word_means_for_a_group_at_work(word: RankPresent, news: News) -> None:
    assert met("d-0", "d-0", "d-1").hear(word, 1.0) is news
    if news is News.GROWS:
        assert met("d-1", "d-0", "d-1").hear(word, 1.0) is News.NOTHING  # it does not lead
    muster = met("d-0", "d-0", "d-1")
    muster.wait(0.0)
    assert muster.hear(word, 1.0) is News.NOTHING


def test_a_meeting_is_come_to_once_and_by_who_was_called() -> None:
    muster = met("d-1", "d-0", "d-1")
    call = MeetRanks(generation=7, ids=["d-0", "d-1"], lives=[1, 1], address="")
    assert not muster.accepts(call)  # it waits for nobody
    muster.wait(1.0)
    assert not muster.accepts(MeetRanks(generation=7, ids=["d-0", "d-1"], lives=[1, 2], address=""))
    assert not muster.accepts(MeetRanks(generation=7, ids=["d-0"], lives=[1], address=""))
    assert not muster.accepts(MeetRanks(generation=5, ids=["d-0", "d-1"], lives=[1, 1], address=""))
    assert muster.accepts(call) and not muster.accepts(call)
    assert muster.lost(MeetRanks(generation=7, ids=["d-1", "d-0"], lives=[1, 2], address="")) == ["d-0"]


def test_who_cannot_be_met_does_not_keep_the_others_from_going_on() -> None:
    muster = met("d-0", "d-0", "d-1")
    muster.wait(10.0)
    for id in ("d-1", "d-2"):
        muster.hear(present(id, 5), 10.0)
    assert muster.convene(10.0) == ["d-0", "d-1", "d-2"]
    call = MeetRanks(generation=6, ids=["d-0", "d-1", "d-2"], lives=[1] * 3, address="")
    muster.failed(call, 10.5)
    assert muster.convene(10.5) == ["d-0", "d-1"]
    muster.lose("d-1")
    assert muster.convene(10.5) == ["d-0"]
    few = met("d-0", "d-0", "d-1", least=2)
    few.wait(10.0)
    few.lose("d-1")
    few.hear(present("d-2", 5), 10.0)
    few.failed(call, 10.5)
    assert few.convene(10.5) == ["d-0", "d-2"]  # there is nobody else
    muster.met(MeetRanks(generation=7, ids=["d-0"], lives=[1], address=""))
    muster.wait(11.0)
    muster.hear(present("d-2", 5), 11.0)
    assert muster.convene(11.0) == ["d-0", "d-2"]
    cold = Muster(IDS, "d-0", 1, 1)
    cold.failed(call, 0.0)
    for id in ("d-1", "d-2"):
        cold.hear(present(id, 0), 0.0)
    assert cold.convene(0.0) == ["d-0", "d-1", "d-2"]  # all are new


@dataclass
class _Rank:
    """One that does as `bus/meeting.py` does."""

    muster: Muster
    call: MeetRanks | None = None
    until_s: float = 0.0
    breaks_s: float | None = None


@dataclass
class _World:
    rng: random.Random
    loss: float
    now_s: float = 0.0
    ranks: dict[str, _Rank] = field(default_factory=dict)
    words: list[tuple[float, str, RankPresent | MeetRanks]] = field(default_factory=list)
    life: int = 0
    cut: str = ""
    """Whose words and the others' to it are lost."""

    def start(self, id: str) -> None:
        self.life += 1
        self.ranks[id] = _Rank(Muster(IDS, id, self.life, 1))
        self.ranks[id].muster.wait(self.now_s)

    def end(self, id: str, *, is_told: bool) -> None:
        """Others find out by `is_told`, or by a step that fails some time."""
        if self.ranks.pop(id, None) is None:
            return
        for rank in self.ranks.values():
            if is_told:
                self.broken(rank, rank.muster.lose(id))
            elif id in rank.muster.members and not rank.muster.is_waiting:
                rank.breaks_s = self.now_s + self.rng.uniform(0.0, 15.0)

    def broken(self, rank: _Rank, is_broken: bool = True) -> None:
        if is_broken and not rank.muster.is_waiting:
            rank.breaks_s = None
            rank.muster.wait(self.now_s)
            for other in self.ranks.values():  # its connections are closed
                if other.muster.generation == rank.muster.generation and not other.muster.is_waiting:
                    other.breaks_s = min(other.breaks_s or 1e9, self.now_s + self.rng.uniform(0.0, 1.0))

    def say(self, word: RankPresent | MeetRanks, ids: list[str]) -> None:
        said_by = word.ids[0] if isinstance(word, MeetRanks) else word.id
        for id in ids:
            if self.rng.random() >= self.loss and (id == self.cut) == (said_by == self.cut):
                self.words.append((self.now_s + self.rng.choice((0.0, 0.0, 0.3, 2.0)), id, word))

    def tick(self) -> None:
        self.now_s += TICK_S
        due = [word for word in self.words if word[0] <= self.now_s]
        self.words = [word for word in self.words if word[0] > self.now_s]
        for _, id, word in due:
            if (rank := self.ranks.get(id)) is None:
                continue
            if isinstance(word, MeetRanks):
                if rank.call is None and rank.muster.accepts(word):
                    rank.call, rank.until_s = word, self.now_s + MEET_S
            elif (news := rank.muster.hear(word, self.now_s)) is News.BROKEN:
                self.broken(rank)
            elif news is News.GROWS:
                for id in list(rank.muster.members):
                    if id in self.ranks and self.ranks[id].muster.generation == rank.muster.generation:
                        self.broken(self.ranks[id])
        for id, rank in self.ranks.items():
            self._turn(id, rank)

    def _turn(self, id: str, rank: _Rank) -> None:
        muster, others = rank.muster, [one for one in IDS if one != id]
        if rank.breaks_s is not None and rank.breaks_s <= self.now_s:
            self.broken(rank)
        if not muster.is_waiting:
            if muster.is_first and muster.missing:
                self.say(muster.present, muster.missing)
            return
        self.say(muster.present, others)
        if rank.call is None and (ids := muster.convene(self.now_s)):
            rank.call = muster.call(ids, self.now_s, int(self.now_s * 1e9), "")
            rank.until_s = self.now_s + MEET_S
        call = rank.call
        if call is None:
            return
        if call.ids[0] == id:
            self.say(call, call.ids[1:])
        there = [self.ranks[one] for one in call.ids if one in self.ranks and self.ranks[one].call == call]
        if len(there) == len(call.ids):
            for one in there:
                one.muster.met(call)
                one.call = one.breaks_s = None
        elif self.now_s > rank.until_s:
            rank.call = None
            muster.failed(call, self.now_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]))
def test_however_they_come_and_go_all_that_are_there_end_up_together(seed: int, loss: float) -> None:
    rng = random.Random(seed)
    world = _World(rng, loss)
    for id in IDS:
        world.start(id)
    for _ in range(rng.randrange(1, 8)):
        for _ in range(rng.randrange(0, 60)):
            world.tick()
        id = rng.choice(IDS)
        world.cut = rng.choice(("", "", *IDS))
        if id in world.ranks:
            world.end(id, is_told=rng.random() < 0.5)
        else:
            world.start(id)
        for rank in world.ranks.values():  # those of one generation know the same
            assert rank.muster.generation == 0 or rank.muster.id in rank.muster.members
    world.cut = ""
    if not world.ranks:
        world.start("d-1")
    for _ in range(int(2 * FIRST_S / TICK_S)):
        world.tick()
    there = {id: rank.muster for id, rank in world.ranks.items()}
    assert {muster.generation for muster in there.values()} != {0}
    assert len({muster.generation for muster in there.values()}) == 1
    assert all(set(muster.members) == set(there) and not muster.is_waiting for muster in there.values())
