"""Assignment: as good as the best of all permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.balancers.assignment import assign


def test_not_the_greatest_first() -> None:
    """9 first would leave 0: 9 together. 8 and 7 are 15."""
    assert assign(np.array([[9, 8], [7, 0]])).tolist() == [1, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**32))
def test_none_is_better(n: int, most: int, seed: int) -> None:
    gains = np.random.default_rng(seed).integers(0, most + 1, (n, n))
    columns = assign(gains)
    assert sorted(columns.tolist()) == list(range(n))
    assert gains[range(n), columns].sum() == max(gains[range(n), order].sum() for order in permutations(range(n)))
