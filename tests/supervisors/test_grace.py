"""How a replica leaves: every order in which things can happen to two requests, with the rule of epochs beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from supervisors.grace import Fate, Grace, Stage

GRACE_S, MOVING_S = 1.0, 1.0
IDS = ("a", "b")


@dataclass(frozen=True)
class One:
    """A request. `epoch` and `owner` as its entrypoint has them: "source", "dest", "nobody" while it waits to be
    computed anew, "other" then, "" once it has ended. `source`: running, frozen or gone there. `dest`: the epoch under
    which it is held, or owned where `claimed`; `other` likewise. On their way: the destination's `answer`, and that it
    is `given_back`.
    """

    epoch: int = 1
    owner: str = "source"
    source: str = "running"
    dest: int = 0
    claimed: bool = False
    other: int = 0
    answer: str = ""
    given_back: bool = False


class World:
    """The source's real `Grace`, and both requests."""

    has_epochs = True

    def __init__(self) -> None:
        self.grace = Grace(at_once=1, moving_s=MOVING_S)
        self.grace.drain(0.0, GRACE_S)
        self.now_s = 0.0
        self.ones = dict.fromkeys(IDS, One())

    def key(self) -> tuple[object, ...]:
        return (self.now_s, tuple(self.ones.values()), tuple(self.grace._frozen))

    def changed(self, id: str, **fields: object) -> World:
        world = self.copied()
        world.ones[id] = replace(self.ones[id], **fields)  # type: ignore[arg-type]
        return world

    def copied(self) -> World:
        world = copy.copy(self)
        world.ones, world.grace = dict(self.ones), copy.copy(self.grace)
        world.grace._frozen, world.grace.counts = dict(self.grace._frozen), dict(self.grace.counts)
        world.grace.pauses_s = list(self.grace.pauses_s)
        return world

    @property
    def num_held(self) -> int:
        return sum(one.source != "gone" for one in self.ones.values())

    def stage(self) -> Stage:
        return self.grace.stage(self.num_held, self.now_s)

    def next(self) -> Iterator[tuple[str, World]]:
        """Whatever may happen now."""
        if self.now_s < GRACE_S + MOVING_S:
            world = self.copied()
            world.now_s += 0.5
            yield "time", world
        turn = self.copied()
        running = [id for id, one in self.ones.items() if one.source == "running"]
        if frozen := turn.grace.freeze(running, self.now_s):
            for id in frozen:
                turn.ones[id] = replace(turn.ones[id], source="frozen")
            yield "freeze", turn
        for id, one in self.ones.items():
            yield from ((f"{what} {id}", world) for what, world in self.next_of(id, one))

    def next_of(self, id: str, one: One) -> Iterator[tuple[str, World]]:
        if one.source == "running":
            yield "finishes", self.changed(id, source="gone", owner="" if one.owner == "source" else one.owner)
        if one.owner:
            yield "is cancelled", self.changed(id, owner="")
        if one.source == "frozen":
            if not one.dest and self.grace.left_s(self.now_s):
                yield "is pulled", self.changed(id, dest=1)
            yield "is given up", self.settled(id, Fate.GIVEN_BACK, given_back=True)
            if not one.owner:
                yield "cancel is heard", self.settled(id, Fate.ENDED)
            if one.answer == "handed over":
                yield "is handed over", self.settled(id, Fate.MOVED)
        if one.given_back:
            is_current = one.owner and self.is_current(1, one)
            fields = {"epoch": one.epoch + 1, "owner": "nobody"} if is_current else {}
            yield "is heard of", self.changed(id, given_back=False, **fields)
        if one.owner == "nobody":
            yield "is computed anew", self.changed(id, owner="other", epoch=one.epoch + 1, other=one.epoch + 1)
        if one.dest and not one.claimed:
            if one.owner and self.is_current(one.dest, one):
                owned = self.changed(id, epoch=one.epoch + 1, owner="dest", dest=one.epoch + 1, claimed=True)
                yield "is claimed", owned.changed(id, answer="handed over")
                yield "is claimed, and the answer lost", owned
            else:
                yield "is not claimed", self.changed(id, dest=0)

    def is_current(self, epoch: int, one: One) -> bool:
        return epoch == one.epoch or not self.has_epochs

    def settled(self, id: str, fate: Fate, **fields: object) -> World:
        world = self.changed(id, source="gone", **fields)
        assert world.grace.settle(id, fate, self.now_s)
        assert not world.grace.settle(id, Fate.GIVEN_BACK, self.now_s)
        return world


def check(world: World) -> None:
    """None lost, none owned twice; no more stand still than should; GONE is gone."""
    for one in world.ones.values():
        holders = {"source": one.source == "running", "dest": one.claimed, "other": bool(one.other)}
        epochs = {"source": 1, "dest": one.dest, "other": one.other}
        assert sum(world.is_current(epochs[name], one) for name, holds in holders.items() if holds) <= 1
        if one.owner == "source":
            assert one.source != "gone" or one.given_back, "lost: its owner has it no more, and does not say so"
        if one.owner == "dest":
            assert one.claimed and one.dest == one.epoch
    frozen = [id for id, one in world.ones.items() if one.source == "frozen"]
    assert sorted(world.grace._frozen) == frozen
    assert len(frozen) <= 1 or world.now_s >= GRACE_S + MOVING_S
    assert (world.stage() is Stage.GONE) is (world.num_held == 0)
    assert world.now_s >= GRACE_S or not frozen


def test_in_every_order_none_is_lost_none_is_owned_twice_and_the_end_always_comes() -> None:
    begin = World()
    seen, todo, ends = {begin.key()}, [begin], 0
    while todo:
        world = todo.pop()
        check(world)
        following = list(world.next())
        if not following:
            ends += 1
            assert world.stage() is Stage.GONE and all(one.owner != "source" for one in world.ones.values())
        if world.now_s >= GRACE_S + MOVING_S and world.stage() is not Stage.GONE:
            assert any(what.startswith(("freeze", "is given up")) for what, _ in following)
        for _, one in following:
            if one.key() not in seen:
                seen.add(one.key())
                todo.append(one)
    assert ends and len(seen) > 1000


def test_the_stages_and_who_leaves_when() -> None:
    grace = Grace(at_once=2, moving_s=3.0)
    assert grace.stage(5, 0.0) is Stage.SERVING and grace.freeze(["a"], 100.0) == []
    grace.drain(10.0, 60.0)
    grace.drain(20.0, 5.0)  # sooner than was said before
    grace.drain(21.0, 500.0)
    assert grace.stage(5, 24.9) is Stage.DRAINING and grace.freeze(["a"], 24.9) == []
    assert grace.stage(0, 24.9) is Stage.GONE
    assert grace.freeze(["a", "b", "c"], 25.0) == ["a", "b"] and grace.freeze(["c"], 25.0) == []
    assert grace.stage(3, 25.0) is Stage.MOVING and grace.left_s(26.0) == 2.0
    assert grace.settle("a", Fate.MOVED, 25.5) and grace.pauses_s == [0.5]
    assert grace.freeze(["c", "d"], 26.0) == ["c"]
    assert grace.stage(2, 28.0) is Stage.GIVING_BACK and grace.left_s(28.0) == 0.0
    assert grace.freeze(["d", "e", "f"], 28.0) == ["d", "e", "f"]
    for id in "bcdef":
        assert grace.stage(0, 29.0) is not Stage.GONE
        assert grace.settle(id, Fate.GIVEN_BACK, 29.0)
    assert not grace.settle("a", Fate.GIVEN_BACK, 29.0)
    assert grace.stage(0, 29.0) is Stage.GONE and grace.counts == {Fate.MOVED: 1, Fate.GIVEN_BACK: 5, Fate.ENDED: 0}


def no_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "has_epochs", False)


def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grace, "left_s", lambda self, now_s: 0.0)


def too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = Grace.freeze
    monkeypatch.setattr(Grace, "freeze", lambda self, running, now_s: freeze(self, running, now_s + GRACE_S))


def never_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "settled", lambda self, id, fate, **fields: self.changed(id, source="gone", **fields))


@pytest.mark.parametrize("plant", [no_epochs, all_at_once, too_early, never_settled])
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_in_every_order_none_is_lost_none_is_owned_twice_and_the_end_always_comes()
