"""The table of blocks is a dict in a few arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.rules import blocks
from actors.rules.blocks import BlockTable, Keys

# Few places to begin at, so that probes are long and entries stand in each other's way.
UNIVERSE = np.random.default_rng(0).integers(0, 2**63, (120, 2)).astype(np.uint64)
UNIVERSE[:, 0] &= np.uint64(0xF << 59)
NUMBERS = st.lists(st.integers(0, len(UNIVERSE) - 1), max_size=40)


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.model: dict[int, int] = {}
        self.next_value = 0

    @rule(numbers=NUMBERS)
    def put(self, numbers: list[int]) -> None:
        values = list(range(self.next_value, self.next_value + len(numbers)))
        self.next_value += len(numbers)
        self.table.put(UNIVERSE[numbers], np.array(values, dtype=np.uint64))
        self.model.update(zip(numbers, values, strict=True))

    @rule(numbers=NUMBERS, is_other=st.sampled_from([0, 0, 1]))
    def remove(self, numbers: list[int], is_other: int) -> None:
        """An entry that has another value by now stays."""
        values = [self.model.get(number, 0) + (is_other and number % 2) for number in numbers]
        gone = self.table.remove(UNIVERSE[numbers], np.array(values, dtype=np.uint64)).tolist()
        assert gone == [self.model.get(number) == value for number, value in zip(numbers, values, strict=True)]
        for number in itertools.compress(numbers, gone):
            self.model.pop(number, None)

    @rule(modulus=st.integers(2, 5))
    def remove_where(self, modulus: int) -> None:
        known = {number for number, value in self.model.items() if value % modulus == 0}
        for _ in self.table.sweep(lambda _, values: values % np.uint64(modulus) == 0):
            pass
        for number in known:
            del self.model[number]

    @rule()
    def churn(self) -> None:
        """Entries that come and go leave no room taken for good."""
        for _ in range(8):
            self.put(list(range(20, 100)))
            self.remove(list(range(20, 100)), 0)
        assert self.table.size_bytes <= 1024 * 25

    @invariant()
    def the_same(self) -> None:
        values, there = self.table.find(UNIVERSE)
        assert {n: int(values[n]) for n in np.flatnonzero(there)} == self.model
        assert len(self.table) == len(self.model)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)


def many(num: int) -> Keys:
    return np.random.default_rng(1).integers(0, 2**63, (num, 2)).astype(np.uint64) << np.uint64(1)


@pytest.mark.parametrize("num", [0, 1, 8192, 100_000])
def test_many_at_once_and_what_they_take(num: int) -> None:
    table, keys = BlockTable(), many(num)
    table.put(keys, np.arange(num, dtype=np.uint64))
    values, there = table.find(keys)
    assert there.all() and values.tolist() == list(range(num)) and len(table) == num
    assert not table.find(keys ^ np.uint64(1))[1].any()
    if num > 10_000:
        assert table.size_bytes / num < 100


def test_it_grows_a_little_with_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_AT_ONCE", 64)
    move, moved = BlockTable._move, list[int]()

    def spy(self: BlockTable, num_places: int) -> None:
        moved.append(num_places)
        move(self, num_places)

    monkeypatch.setattr(BlockTable, "_move", spy)
    table, keys = BlockTable(), many(6000)
    for start in range(0, len(keys), 16):
        table.put(keys[start : start + 16], np.arange(16, dtype=np.uint64))
    assert set(moved) == {64} and len(moved) > 40
    assert table.find(keys)[1].all() and len(table) == len(keys)
