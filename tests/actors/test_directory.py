"""The directory of snapshots: hints that never outlive what they tell of for longer than they say."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.metadata.directory import Directory
from schemas.cache import Snapshot
from tests.actors.shelf import snapshot

KEYS = [bytes([number]) * 16 for number in range(6)]
HOLDERS = ["prefill/p0", "prefill/p1", "decode/d0"]
MOST = 4


class Model(RuleBasedStateMachine):
    """All that came, in order; what counts is worked out anew at each question."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(MOST)
        self.model: dict[bytes, Snapshot] = {}
        self.now_ns = 100

    def live(self) -> dict[bytes, Snapshot]:
        return {key: known for key, known in self.model.items() if known.expires_ns > self.now_ns}

    @rule(
        key=st.sampled_from(KEYS),
        holder=st.sampled_from(HOLDERS),
        lease=st.integers(-2, 20),
        approximate=st.booleans(),
    )
    def keep(self, key: bytes, holder: str, lease: int, approximate: bool) -> None:
        new = snapshot(key, holder, self.now_ns + lease, approximate=approximate)
        self.directory.keep(new, self.now_ns)
        known = self.live().get(key)
        if known and not known.approximate and approximate and known.holder != holder:
            return
        self.model.pop(key, None)
        if lease > 0:
            self.model[key] = new
            while len(self.model) > MOST or next(iter(self.model.values())).expires_ns <= self.now_ns:
                del self.model[next(iter(self.model))]

    @rule(holder=st.sampled_from(HOLDERS))
    def forget(self, holder: str) -> None:
        self.directory.forget(holder)
        self.model = {key: known for key, known in self.model.items() if known.holder != holder}

    @rule(kept=st.sets(st.sampled_from(KEYS), min_size=3))
    def retain(self, kept: set[bytes]) -> None:
        self.directory.retain(lambda keys: np.array([key.tobytes() in kept for key in keys], np.bool_))
        self.model = {key: known for key, known in self.model.items() if key in kept}

    @rule(step=st.integers(1, 15))
    def wait(self, step: int) -> None:
        self.now_ns += step

    @rule()
    def look(self) -> None:
        """One that has expired is forgotten when it is asked for: it takes no room from others."""
        for key in KEYS:
            assert self.directory.find(key, self.now_ns) == self.live().get(key)
        self.model = self.live()

    @invariant()
    def bounded_and_counted(self) -> None:
        assert len(self.directory) == len(self.model) <= MOST
        assert sum(map(len, self.directory._of_holder.values())) == len(self.model)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_approximate_one_never_replaces_an_exact_one_that_lives() -> None:
    directory = Directory()
    exact, worse = snapshot(KEYS[0], "prefill/p0", 50), snapshot(KEYS[0], "prefill/p1", 90, approximate=True)
    directory.keep(exact, 10)
    directory.keep(worse, 20)
    assert directory.find(KEYS[0], 30) == exact
    directory.keep(worse, 60)
    assert directory.find(KEYS[0], 70) == worse
    directory.keep(snapshot(KEYS[0], "decode/d0", 95), 70)
    assert directory.find(KEYS[0], 71) == snapshot(KEYS[0], "decode/d0", 95)
    own = snapshot(KEYS[0], "decode/d0", 99, approximate=True)
    directory.keep(own, 72)
    assert directory.find(KEYS[0], 73) == own, "its holder knows best what it has"
