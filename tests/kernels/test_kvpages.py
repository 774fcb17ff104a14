"""Blocks of a whole pool: requests of any size come and go."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kernels.cache import StatePool
from kernels.config import ModelConfig
from kernels.engine import BLOCK_TOKENS, Admission
from kernels.pages import PoolFull
from tests.kernels.conftest import GOLDEN

SLOTS, BLOCKS, LONGEST = 3, 7, 5 * BLOCK_TOKENS


class Requests(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(ModelConfig.from_folder(GOLDEN / "mini"), SLOTS, LONGEST, 5, num_blocks=BLOCKS)
        self.slots: dict[int, int] = {}  # and their room in tokens

    @rule(num_tokens=st.integers(1, LONGEST + 200))
    def alloc(self, num_tokens: int) -> None:
        wanted, free = -(-num_tokens // BLOCK_TOKENS), self.pool.kv.num_free
        admission = self.pool.admit(num_tokens)
        if num_tokens > LONGEST:
            assert admission is Admission.NEVER
        else:
            fits = wanted <= free and len(self.slots) < SLOTS
            assert admission is (Admission.OK if fits else Admission.LATER)
        if admission is not Admission.OK:
            with pytest.raises(PoolFull):
                self.pool.alloc(num_tokens)
            assert self.pool.kv.num_free == free and self.pool.num_free == SLOTS - len(self.slots)
            return
        self.slots[self.pool.alloc(num_tokens)] = num_tokens
        assert self.pool.kv.num_free == free - wanted

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.slots:
            slot = data.draw(st.sampled_from(sorted(self.slots)))
            self.pool.free(slot)
            del self.slots[slot]

    @invariant()
    def no_block_has_two_requests_and_none_is_lost(self) -> None:
        own = []
        for slot, room in self.slots.items():
            num = -(-room // BLOCK_TOKENS)
            table = self.pool.kv.tables[slot].tolist()
            assert not any(table[num:])
            own += table[:num]
        assert 0 not in own and len(set(own)) == len(own)
        assert self.pool.kv.num_free == BLOCKS - len(own)

    def teardown(self) -> None:
        for slot in self.slots:
            self.pool.free(slot)
        assert self.pool.kv.num_free == BLOCKS and self.pool.num_free == SLOTS
        assert not self.pool.kv.tables.any()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
