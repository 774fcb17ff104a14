import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kernels.engine import Admission
from kernels.pages import PagePool, PoolFull

NUM = 7


class Owners(RuleBasedStateMachine):
    """Requests take blocks and give them back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM)
        self.requests: list[list[int]] = []

    @rule(num=st.integers(0, NUM + 2))
    def take(self, num: int) -> None:
        free = self.pool.num_free
        admission = self.pool.admit(num)
        assert admission is (Admission.NEVER if num > NUM else Admission.OK if num <= free else Admission.LATER)
        if admission is Admission.OK:
            self.requests.append(self.pool.take(num))
            assert self.pool.num_free == free - num
            return
        with pytest.raises(PoolFull):
            self.pool.take(num)
        assert self.pool.num_free == free  # all or nothing

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.requests:
            self.pool.give_back(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @rule(blocks=st.lists(st.integers(-1, NUM + 1), max_size=3))
    def give_back_what_is_not_taken(self, blocks: list[int]) -> None:
        taken = [block for request in self.requests for block in request]
        if len(set(blocks)) != len(blocks) or not set(blocks) <= set(taken):
            with pytest.raises(ValueError, match="not all of the blocks"):
                self.pool.give_back(blocks)

    @invariant()
    def every_block_is_free_or_owned_once(self) -> None:
        taken = [block for request in self.requests for block in request]
        assert len(set(taken)) == len(taken) and 0 not in taken
        assert self.pool.num_free == NUM - len(taken)

    def teardown(self) -> None:
        for request in self.requests:
            self.pool.give_back(request)
        assert self.pool.num_free == NUM and self.pool.admit(NUM) is Admission.OK


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PagePool(0)
