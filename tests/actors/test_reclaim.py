"""Reclaim: the least recently used leaf goes first, and no block outlives its parent by it; held to a plain model."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.kvstore.reclaim import Reclaim

ROOT = b"a space's root ."
NAMES = [bytes([number]) * 16 for number in range(8)]
PARENTS = dict(zip(NAMES, [ROOT, *(NAMES[number] for number in (0, 1, 1, 0)), ROOT, *NAMES[5:7]], strict=True))
"""Two trees, of chains and branches: a block's parent follows from its key, as digests have it."""

names, steps = st.sampled_from(NAMES), st.sampled_from([0.0, 0.0, 1.0, 1.5, -3.0])


class Model(RuleBasedStateMachine):
    """All blocks and times in one dict; every question is answered by looking at all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reclaim = Reclaim()
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


def chain(reclaim: Reclaim, name: str, num_blocks: int, now: float) -> list[bytes]:
    keys = [f"{name}{number:08}".encode() for number in range(num_blocks)]
    for parent, key in zip([ROOT, *keys], keys, strict=False):
        reclaim.stored(key, parent, now)
    return keys


def test_the_oldest_chain_goes_from_its_end() -> None:
    reclaim = Reclaim()
    old, new = chain(reclaim, "old", 3, 1.0), chain(reclaim, "new", 3, 2.0)
    assert reclaim.victims(4) == [*old[::-1], new[2]]
    reclaim.touched(new, 3.0)
    assert reclaim.victims(9) == new[1::-1] and reclaim.num_blocks == 0


def test_a_touch_of_a_block_keeps_its_ancestors() -> None:
    reclaim = Reclaim()
    one, two = chain(reclaim, "one", 3, 1.0), chain(reclaim, "two", 3, 2.0)
    reclaim.touched([one[1]], 3.0)
    assert reclaim.victims(9) == [one[2], *two[::-1], one[1], one[0]]


def test_a_parent_that_comes_after_its_children_goes_after_them() -> None:
    """As when a store is read at start, slot by slot, or when a lost block is stored again."""
    reclaim = Reclaim()
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
    reclaim = Reclaim()
    keys = chain(reclaim, "a", 2, 1.0)
    reclaim.dropped(keys[1])
    reclaim.stored(keys[1], keys[0], 1.0)
    assert reclaim.victims(2) == keys[::-1]


def test_a_block_is_as_recent_as_what_was_built_on_it() -> None:
    reclaim = Reclaim()
    one, two = chain(reclaim, "one", 2, 1.0), chain(reclaim, "two", 2, 2.0)
    reclaim.touched([one[1]], 3.0)
    reclaim.dropped(one[1])
    assert reclaim.victims(9) == [*two[::-1], one[0]]


def test_time_does_not_run_backwards() -> None:
    reclaim = Reclaim()
    for key, now in ((b"parent", 5.0), (b"older", 6.0), (b"newer", 7.0)):
        reclaim.stored(key, ROOT, now)
    reclaim.stored(b"child", b"parent", 3.0)
    reclaim.dropped(b"child")
    assert reclaim.victims(1) == [b"older"]


def test_blocks_without_a_leaf_are_no_victims() -> None:
    reclaim = Reclaim()
    reclaim.stored(b"one", b"one", 1.0)
    assert reclaim.victims(1) == [] and reclaim.num_blocks == 1


def test_what_is_kept_does_not_grow_with_use() -> None:
    reclaim = Reclaim()
    keys = chain(reclaim, "a", 4, 0.0)
    for now in range(1, 1000):
        reclaim.touched(keys, now)
        reclaim.dropped(keys[3])
        reclaim.stored(keys[3], keys[2], now)
    assert max(len(value) for value in vars(reclaim).values() if hasattr(value, "__len__")) < 100


def test_a_long_history_in_agreement_with_itself() -> None:
    """Thousands of blocks: what stays is always closed under parents, and all of it goes in the end."""
    chance, reclaim, parents = random.Random(4), Reclaim(), dict[bytes, bytes]()
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
