"""The slots of a writer: whatever comes, each has one owner, and the world is told of exactly what can be found."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import actors.writer.blocks as blocks_module
from actors.rules import keys as block_keys
from actors.rules.location import Location, words
from actors.rules.slab import Slab, SlotHeader
from actors.writer.held import APPROXIMATE, BUSY, EXACT, FREE, Place
from actors.writer.slots import Slots
from schemas.cache import BlocksStored

LAYOUTS = [(40, b"a" * 16), (60, b"b" * 16)]
NUM_SLOTS = 5


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()[:16]


def array(*numbers: int) -> block_keys.Keys:
    return block_keys.keys(b"".join(map(key, numbers)))


class View:
    """What somebody knows who hears all events."""

    def __init__(self) -> None:
        self.seq = 0
        self.blocks: dict[bytes, tuple[bytes, int]] = {}

    def hear(self, slots: Slots) -> None:
        for event in slots.outbox:
            self.seq += 1
            assert (event.writer, event.incarnation, event.seq) == ("w0", "i", self.seq)
            places = zip(_split(event.keys), words(event.locations).tolist(), strict=True)
            if isinstance(event, BlocksStored):
                for (name, location), parent in zip(places, _split(event.parents), strict=True):
                    self.blocks[name] = (parent, location)
            else:
                for name, location in places:
                    assert self.blocks.pop(name)[1] == location, "dropped where it was not"
        slots.outbox.clear()
        assert self.seq == slots.seq


def _split(data: bytes) -> list[bytes]:
    return [data[at : at + 16] for at in range(0, len(data), 16)]


class SlotsMachine(RuleBasedStateMachine):
    """Against a model: the best copy of each key, and which busy places we hold."""

    @initialize()
    def start(self) -> None:
        self.slots = Slots("w0", "i")
        self.view = View()
        self.best: dict[bytes, bool] = {}  # whether approximate
        self.writing: dict[Place, None] = {}
        self.freeing: dict[Place, None] = {}
        self.stuck: dict[Place, None] = {}
        self.past: dict[tuple[bytes, int], None] = {}
        self.num_slabs = 0

    def in_hand(self) -> list[Place]:
        return [*self.writing, *self.freeing, *self.stuck]

    @rule(layout=st.sampled_from(LAYOUTS), content=st.dictionaries(st.integers(0, 4), st.integers(0, 11)))
    @precondition(lambda self: self.num_slabs < 6)
    def add(self, layout: tuple[int, bytes], content: dict[int, int]) -> None:
        self.num_slabs += 1
        headers = [
            (slot, SlotHeader(key(n // 2), key(n // 2 + 100), bool(n % 2), 1)) for slot, n in sorted(content.items())
        ]
        held = self.slots.add(self.num_slabs, Slab(layout[0], NUM_SLOTS, layout[1], 2), sorted(content))
        surplus = [*self.slots.fill(held, headers[:2]), *self.slots.fill(held, headers[2:])]
        for n in content.values():
            self.best[key(n // 2)] = self.best.get(key(n // 2), True) and bool(n % 2)
        self.freeing |= dict.fromkeys(surplus)

    @rule(layout=st.sampled_from(LAYOUTS), num=st.integers(1, 7))
    def take(self, layout: tuple[int, bytes], num: int) -> None:
        num_free = self.slots.num_free(layout)
        places = self.slots.take(layout, num)
        assert (places is None) == (num > num_free)
        for place in places or ():
            assert place.held.layout == layout
            assert place not in self.writing
            self.writing[place] = None

    @rule(data=st.data(), is_approximate=st.booleans())
    @precondition(lambda self: self.writing)
    def commit(self, data: Any, is_approximate: bool) -> None:
        places = data.draw(st.lists(st.sampled_from(list(self.writing)), unique=True, min_size=1))
        numbers = data.draw(st.lists(st.integers(0, 5), min_size=len(places), max_size=len(places)))
        wanted = self.slots.wanted(array(*numbers), approximate=is_approximate)
        expected = {n for n in numbers if self.best.get(key(n), 2) > is_approximate}
        assert {n for n, flag in zip(numbers, wanted, strict=True) if flag} == expected
        assert wanted.sum() == len(expected)
        for place in places:
            del self.writing[place]
        flags = np.full(len(places), is_approximate)
        parents = array(*(n + 100 for n in numbers))
        alive = [self.slots.holds(place.held) for place in places]
        num_new, surplus = self.slots.commit(places, array(*numbers), parents, flags)
        landed = {n for n, is_alive in zip(numbers, alive, strict=True) if is_alive} & expected
        assert num_new == len(landed)
        self.best |= {key(n): is_approximate for n in landed}
        self.freeing |= dict.fromkeys(surplus)

    @rule(data=st.data())
    @precondition(lambda self: self.writing or self.freeing)
    def fail(self, data: Any) -> None:
        place = data.draw(st.sampled_from([*self.writing, *self.freeing]))
        self.writing.pop(place, None)
        self.freeing.pop(place, None)
        self.slots.fail([place])
        if self.slots.holds(place.held):
            self.stuck[place] = None

    @rule()
    def try_stuck_again(self) -> None:
        places = self.slots.stuck()
        assert set(places) == set(self.stuck)
        self.freeing |= self.stuck
        self.stuck = {}

    @rule()
    def release(self) -> None:
        self.slots.release(list(self.freeing))
        self.freeing = {}

    @rule(data=st.data())
    @precondition(lambda self: self.view.blocks)
    def drop(self, data: Any) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.view.blocks)), min_size=1))
        wrong = data.draw(st.sampled_from(["", "key", "slab", "slot"]))
        locations = [self.view.blocks[name][1] for name in chosen]
        if wrong == "slab":
            locations = [Location(99, Location.unpack(location).slot).pack() for location in locations]
        if wrong == "slot":
            locations = [Location(Location.unpack(location).slab, 77).pack() for location in locations]
        names = [key(1000) for _ in chosen] if wrong == "key" else chosen
        places = self.slots.drop(block_keys.keys(b"".join(names)), np.array(locations, np.uint64))
        if wrong:
            assert not places
            return
        assert len(places) == len(set(chosen))
        self.freeing |= dict.fromkeys(places)
        for name in set(chosen):
            del self.best[name]

    @rule(data=st.data())
    @precondition(lambda self: self.past)
    def drop_what_was_there_once(self, data: Any) -> None:
        name, location = data.draw(st.sampled_from(list(self.past)))
        if self.view.blocks.get(name, (b"", -1))[1] != location:
            assert not self.slots.drop(block_keys.keys(name), np.array([location], np.uint64))

    @rule(numbers=st.lists(st.integers(0, 7)))
    def repeat(self, numbers: list[int]) -> None:
        self.slots.repeat(array(*numbers))
        told = [name for event in self.slots.outbox for name in _split(event.keys)]
        assert sorted(told) == sorted({key(n) for n in numbers} & self.best.keys())

    @rule(data=st.data())
    @precondition(lambda self: self.past)
    def deny(self, data: Any) -> None:
        said = data.draw(st.lists(st.sampled_from(list(self.past)), min_size=1))
        locations = np.array([location for _, location in said], np.uint64)
        self.slots.deny(block_keys.keys(b"".join(name for name, _ in said)), locations)
        told = [
            place
            for event in self.slots.outbox
            for place in zip(_split(event.keys), words(event.locations).tolist(), strict=True)
        ]
        ours = {held.number for held in self.slots.slabs}
        are_ours = [place for place in said if Location.unpack(place[1]).slab in ours]
        assert told == [place for place in are_ours if self.view.blocks.get(place[0], (b"", -1))[1] != place[1]]
        assert self.slots.seq == self.view.seq + len(self.slots.outbox)
        self.view.seq = self.slots.seq
        self.slots.outbox.clear()

    @rule(data=st.data())
    @precondition(lambda self: self.slots.slabs)
    def forget(self, data: Any) -> None:
        held = data.draw(st.sampled_from(self.slots.slabs))
        places = {name: Location.unpack(location) for name, (_, location) in self.view.blocks.items()}
        gone = {name for name, place in places.items() if place.slab == held.number}
        self.slots.forget(held)
        self.slots.forget(held)
        self.best = {name: flag for name, flag in self.best.items() if name not in gone}
        # Busy places of it may come back later; they must change nothing. The model lets go of those that wait.
        self.freeing = {place: None for place in self.freeing if place.held is not held}
        self.stuck = {place: None for place in self.stuck if place.held is not held}

    @invariant()
    def all_agree(self) -> None:
        self.view.hear(self.slots)
        assert {name: bool(location & 1) for name, (_, location) in self.view.blocks.items()} == self.best
        self.past |= {(name, location): None for name, (_, location) in self.view.blocks.items()}
        dump = self.slots.dump()
        told = zip(_split(dump.parents.tobytes()), dump.locations.tolist(), strict=True)
        assert dict(zip(_split(dump.keys.tobytes()), told, strict=True)) == self.view.blocks
        assert len(dump) == self.slots.num_blocks == len(self.best)

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        busy = [place for place in self.in_hand() if self.slots.holds(place.held)]
        assert len(set(busy)) == len(busy)
        states = {FREE: 0, BUSY: 0, EXACT: 0, APPROXIMATE: 0}
        for held in self.slots.slabs:
            assert sorted(held.free) == np.flatnonzero(held.states == FREE).tolist()
            assert {slot for of, slot in busy if of is held} == set(np.flatnonzero(held.states == BUSY).tolist())
            for state in states:
                states[state] += int((held.states == state).sum())
        assert sum(states.values()) == self.slots.num_slots
        assert states[FREE] == self.slots.num_free()
        assert states[EXACT] + states[APPROXIMATE] == self.slots.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.release(self.slots.stuck())
        self.slots.release([*self.writing, *self.freeing])
        dump = self.slots.dump()
        self.slots.release(self.slots.drop(dump.keys, dump.locations))
        assert self.slots.num_free() == self.slots.num_slots
        assert self.slots.num_blocks == 0
        assert {held.layout for held in self.slots.empty(LAYOUTS[0])} <= {LAYOUTS[1]}


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def filled(num_slots: int, num_blocks: int) -> Slots:
    slots = Slots("w0", "i")
    slots.add(7, Slab(40, num_slots, b"a" * 16, 1))
    places = slots.take(LAYOUTS[0], num_blocks)
    assert places is not None
    numbers = range(num_blocks)
    slots.commit(places, array(*numbers), array(*numbers), np.zeros(num_blocks, bool))
    return slots


def test_large_events_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MAX_EVENT_BLOCKS", 10)
    slots = filled(50, 25)
    assert [len(event.keys) // 16 for event in slots.outbox] == [10, 10, 5]
    view = View()
    view.hear(slots)
    slots.forget(slots.slabs[0])
    assert [len(event.keys) // 16 for event in slots.outbox] == [10, 10, 5]
    view.hear(slots)
    assert view.blocks == {} and slots.seq == 6


def test_neighbours_are_taken_together() -> None:
    slots = filled(50, 10)
    places = slots.take(LAYOUTS[0], 5)
    assert places is not None and [place.slot for place in places] == [10, 11, 12, 13, 14]


def test_a_dump_for_a_shard_has_what_it_owns() -> None:
    dump = filled(300, 300).dump()
    shards = ["m0", "m1", "m2"]
    parts = [dump.owned(shard, shards) for shard in shards]
    assert all(len(part) > 50 for part in parts)
    assert sorted(location for part in parts for location in part.locations.tolist()) == dump.locations.tolist()
    assert [len(dump.owned("", [])), len(dump.owned("gone", shards))] == [300, 0]


def test_one_number_is_one_slab() -> None:
    slots = filled(5, 1)
    with pytest.raises(ValueError, match="is here"):
        slots.add(7, Slab(40, 5, b"a" * 16, 1))
