import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kernels.engine import Admission
from kernels.pages import PagePool, PoolFull

NUM = 7


class Holders(RuleBasedStateMachine):
    """Requests take blocks, writers share some, both give back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM)
        self.requests: list[list[int]] = []
        self.shared: list[int] = []

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
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(-1, NUM + 1))
        if block in self.held():
            self.pool.share(block)
            self.shared.append(block)
        else:
            with pytest.raises(ValueError, match="not held"):
                self.pool.share(block)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.requests:
            for block in self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))):
                self.pool.release(block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(-1, NUM + 1))
        if block in self.shared:
            self.shared.remove(block)
            self.pool.release(block)
        elif block not in self.held():
            with pytest.raises(ValueError, match="not held"):
                self.pool.release(block)

    @invariant()
    def every_block_is_free_or_owned_once(self) -> None:
        taken = [block for request in self.requests for block in request]
        assert len(set(taken)) == len(taken) and 0 not in taken
        assert self.pool.num_free == NUM - len(self.held())

    def teardown(self) -> None:
        for block in [block for request in self.requests for block in request] + self.shared:
            self.pool.release(block)
        assert self.pool.num_free == NUM and self.pool.admit(NUM) is Admission.OK

    def held(self) -> set[int]:
        return {block for request in self.requests for block in request} | set(self.shared)


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PagePool(0)
