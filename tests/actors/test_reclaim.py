"""Reclaim: the least recently used leaf goes first, and no block outlives its parent by it; held to a plain model."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.kvstore import reclaim as reclaim_module
from actors.kvstore.reclaim import Reclaim
from actors.rules import keys as block_keys
from actors.rules.blocks import Keys
from actors.rules.location import Location

PLACE = np.array([Location(3, 1).pack()], dtype=np.uint64)
ROOT = b"a space's root ."
NAMES = [bytes([number]) * 16 for number in range(8)]
PARENTS = dict(zip(NAMES, [ROOT, *(NAMES[number] for number in (0, 1, 1, 0)), ROOT, *NAMES[5:7]], strict=True))
"""Two trees, of chains and branches: a block's parent follows from its key, as digests have it."""



class Named:
    """Reclaim, told of blocks by names one at a time."""

    def __init__(self) -> None:
        self.reclaim = Reclaim()

    @property
    def num_blocks(self) -> int:
        return self.reclaim.num_blocks

    def stored(self, key: bytes, parent: bytes, now: float) -> None:
        self.reclaim.stored(arrays([key]), arrays([parent]), PLACE, now)

    def touched(self, keys: list[bytes], now: float) -> None:
        self.reclaim.touched(arrays(keys), now)

    def dropped(self, key: bytes) -> None:
        self.reclaim.dropped(arrays([key]), PLACE)

    def victims(self, num: int) -> list[bytes]:
        keys, locations = self.reclaim.victims(num)
        assert (locations == PLACE[0]).all()
        return [NAMES_OF[key.tobytes()] for key in keys]


NAMES_OF: dict[bytes, bytes] = {}


def arrays(names: list[bytes]) -> Keys:
    """Keys that are digests, as they should be."""
    digests = [hashlib.blake2b(name, digest_size=16).digest() for name in names]
    NAMES_OF.update(zip(digests, names, strict=True))
    return block_keys.keys(b"".join(digests))


names, steps = st.sampled_from(NAMES), st.sampled_from([0.0, 0.0, 1.0, 1.5, -3.0])


class Model(RuleBasedStateMachine):
    """All blocks and times in one dict; every question is answered by looking at all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reclaim = Named()
        self.times: dict[bytes, float] = {}
        self.now = self.latest = 100.0

    def tick(self, step: float) -> float:
        """A time to tell: now and then an earlier one than before, which counts as the latest."""
        self.now = self.latest + step
        self.latest = max(self.latest, self.now)
        return self.now

    def use(self, key: bytes) -> None:
        while key in self.times:
            self.times[key] = self.latest
            key = PARENTS[key]

    def leaves(self) -> set[bytes]:
        return set(self.times) - {PARENTS[key] for key in self.times}

    @rule(key=names, step=steps)
    def store(self, key: bytes, step: float) -> None:
        self.reclaim.stored(key, PARENTS[key], self.tick(step))
        self.times[key] = self.latest
        self.use(key)

    @rule(keys=st.permutations(NAMES), step=steps)
    def store_all(self, keys: list[bytes], step: float) -> None:
        """In any order, as a store is read at start."""
        now = self.tick(step)
        for key in keys:
            self.reclaim.stored(key, PARENTS[key], now)
            self.times[key] = self.latest
            self.use(key)

    @rule(keys=st.lists(names, max_size=4), step=steps)
    def touch(self, keys: list[bytes], step: float) -> None:
        self.reclaim.touched(keys, self.tick(step))
        for key in keys:
            self.use(key)

    @rule(key=names)
    def drop(self, key: bytes) -> None:
        self.reclaim.dropped(key)
        self.times.pop(key, None)

    @rule(num=st.integers(0, 4))
    def give_up(self, num: int) -> None:
        victims = self.reclaim.victims(num)
        assert len(victims) == min(num, len(self.times)) and len(set(victims)) == len(victims)
        for victim in victims:
            leaves = self.leaves()
            assert victim in leaves, "a descendant would outlive it"
            assert self.times[victim] == min(self.times[leaf] for leaf in leaves)
            del self.times[victim]

    @invariant()
    def counts_agree(self) -> None:
        assert self.reclaim.num_blocks == len(self.times)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def chain(reclaim: Named, name: str, num_blocks: int, now: float) -> list[bytes]:
    keys = [f"{name}{number:08}".encode() for number in range(num_blocks)]
    for parent, key in zip([ROOT, *keys], keys, strict=False):
        reclaim.stored(key, parent, now)
    return keys


def test_the_oldest_chain_goes_from_its_end() -> None:
    reclaim = Named()
    old, new = chain(reclaim, "old", 3, 1.0), chain(reclaim, "new", 3, 2.0)
    assert reclaim.victims(4) == [*old[::-1], new[2]]
    reclaim.touched(new, 3.0)
    assert reclaim.victims(9) == new[1::-1] and reclaim.num_blocks == 0


def test_a_touch_of_a_block_keeps_its_ancestors() -> None:
    reclaim = Named()
    one, two = chain(reclaim, "one", 3, 1.0), chain(reclaim, "two", 3, 2.0)
    reclaim.touched([one[1]], 3.0)
    assert reclaim.victims(9) == [one[2], *two[::-1], one[1], one[0]]


def test_a_parent_that_comes_after_its_children_goes_after_them() -> None:
    """As when a store is read at start, slot by slot, or when a lost block is stored again."""
    reclaim = Named()
    reclaim.stored(b"child", b"parent", 1.0)
    reclaim.stored(b"parent", ROOT, 1.0)
    reclaim.stored(b"other", ROOT, 2.0)
    assert reclaim.victims(1) == [b"child"]
    reclaim.stored(b"child", b"parent", 3.0)
    reclaim.dropped(b"parent")
    reclaim.stored(b"parent", ROOT, 4.0)
    assert reclaim.victims(3) == [b"other", b"child", b"parent"]


def test_a_parent_that_was_a_leaf_and_is_none_again_waits_for_its_child() -> None:
    """All at one time, so that nothing but its child tells."""
    reclaim = Named()
    keys = chain(reclaim, "a", 2, 1.0)
    reclaim.dropped(keys[1])
    reclaim.stored(keys[1], keys[0], 1.0)
    assert reclaim.victims(2) == keys[::-1]


def test_a_touch_goes_all_the_way_up() -> None:
    reclaim = Named()
    one, two = chain(reclaim, "one", 5, 1.0), chain(reclaim, "two", 1, 2.0)
    reclaim.touched(one[4:], 3.0)
    for key in one[:0:-1]:
        reclaim.dropped(key)
    assert reclaim.victims(2) == [*two, one[0]]


def test_a_block_is_as_recent_as_what_was_built_on_it() -> None:
    reclaim = Named()
    one, two = chain(reclaim, "one", 2, 1.0), chain(reclaim, "two", 2, 2.0)
    reclaim.touched([one[1]], 3.0)
    reclaim.dropped(one[1])
    assert reclaim.victims(9) == [*two[::-1], one[0]]


def test_time_does_not_run_backwards() -> None:
    reclaim = Named()
    for key, now in ((b"parent", 5.0), (b"older", 6.0), (b"newer", 7.0)):
        reclaim.stored(key, ROOT, now)
    reclaim.stored(b"child", b"parent", 3.0)
    reclaim.dropped(b"child")
    assert reclaim.victims(1) == [b"older"]


def test_blocks_without_a_leaf_are_no_victims() -> None:
    reclaim = Named()
    reclaim.stored(b"one", b"one", 1.0)
    assert reclaim.victims(1) == [] and reclaim.num_blocks == 1


def test_what_is_kept_does_not_grow_with_use() -> None:
    reclaim = Named()
    keys = chain(reclaim, "a", 4, 0.0)
    for now in range(1, 1000):
        reclaim.touched(keys, now)
        reclaim.dropped(keys[3])
        reclaim.stored(keys[3], keys[2], now)
        if now % 100 == 0:
            assert reclaim.victims(1) == [keys[3]]
    assert len(reclaim.reclaim._pool) < 100 and reclaim.reclaim.size_bytes < 100_000


def test_numbers_of_blocks_and_of_parents_that_never_came_are_used_again() -> None:
    reclaim = Named()
    for now in range(200):
        keys = chain(reclaim, f"{now:04}", 20, now)
        for parent in (b"never came %04d", b"nor did this %04d"):
            reclaim.stored(b"%015d" % now, parent % now, now)
        assert len(reclaim.victims(21)) == 21 and reclaim.num_blocks == 0, keys
    assert reclaim.reclaim._num_free == len(reclaim.reclaim._free) == 1024
    assert len(reclaim.reclaim._table) == 0


def test_the_oldest_leaves_are_looked_for_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few: what is told of in between has its place among them."""
    monkeypatch.setattr(reclaim_module, "_POOL", 2)
    reclaim = Named()
    chains = [chain(reclaim, f"{number}", 4, number) for number in range(6)]
    assert reclaim.victims(2) == chains[0][:1:-1]
    reclaim.touched(chains[0], 9.0)
    reclaim.dropped(chains[1][3])
    assert reclaim.victims(4) == [*chains[1][2::-1], chains[2][3]]
    for _ in range(20):
        reclaim.stored(chains[2][3], chains[2][2], 9.5)
        reclaim.dropped(chains[2][3])
    assert reclaim.victims(12) == [block for number in (3, 4, 5) for block in chains[number][::-1]]
    assert reclaim.victims(9) == [chains[0][1], chains[0][0], *chains[2][2::-1]]


def test_a_drop_elsewhere_takes_nothing_away_and_a_block_may_move() -> None:
    reclaim, there = Reclaim(), np.array([Location(4, 1).pack()], dtype=np.uint64)
    key = arrays([b"a"])
    reclaim.stored(key, arrays([ROOT]), PLACE, 1.0)
    assert reclaim.dropped(key, there) == 0 and reclaim.find(key)[0] == PLACE
    reclaim.stored(key, arrays([ROOT]), there, 1.0)
    assert reclaim.dropped(key, PLACE) == 0 and reclaim.find(key)[0] == there
    assert [len(found) for found in (*reclaim.inside([3]), *reclaim.inside([3, 4]))] == [0, 0, 1, 1]
    assert reclaim.dropped(key, there) == 1 and not reclaim.find(key)[1].any()


def test_a_long_history_in_agreement_with_itself() -> None:
    """Thousands of blocks: what stays is always closed under parents, and all of it goes in the end."""
    chance, reclaim, parents = random.Random(4), Named(), dict[bytes, bytes]()
    for now in range(3000):
        parent = chance.choice([ROOT, *list(parents)[-50:]])
        key = now.to_bytes(16, "big")
        parents[key] = parent
        reclaim.stored(key, parent, now)
        if now % 7 == 0:
            reclaim.touched(chance.sample(list(parents), min(3, len(parents))), now)
        if now % 10 == 9:
            for victim in reclaim.victims(8):
                del parents[victim]
        if now % 500 == 0:
            assert set(parents.values()) <= {ROOT, *parents}
    assert reclaim.num_blocks == len(parents)
    assert set(reclaim.victims(len(parents) + 1)) == set(parents)
