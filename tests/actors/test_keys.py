"""Who owns which keys: the same everywhere, and only those of who joins or leaves move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rules import keys as block_keys

KEYS = np.random.default_rng(3).integers(0, 2**64, (400, 2), dtype=np.uint64)
MEMBERS = st.lists(st.text("abc01", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


def names(members: list[str]) -> list[str]:
    return [members[number] for number in block_keys.owners(KEYS, members)]


@given(MEMBERS, st.randoms(use_true_random=False))
def test_the_order_of_members_means_nothing(members: list[str], chance: object) -> None:
    before = names(members)
    chance.shuffle(members)  # type: ignore[attr-defined]
    assert names(members) == before


@given(MEMBERS)
def test_a_member_that_leaves_moves_only_its_own_keys(members: list[str]) -> None:
    before, gone = names(members), members[0]
    if len(members) > 1:
        after = names(members[1:])
        assert all(new == old for new, old in zip(after, before, strict=True) if old != gone)


def test_keys_spread_over_all_and_need_someone() -> None:
    owners = block_keys.owners(KEYS, ["a", "b", "c", "d"])
    assert all(60 < int((owners == number).sum()) < 140 for number in range(4))
    with pytest.raises(ValueError, match="nobody"):
        block_keys.owners(KEYS, [])
    with pytest.raises(ValueError):
        block_keys.keys(b"half of a key")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_of_equal_keys_the_last_stands_for_all(pairs: list[tuple[int, int]]) -> None:
    many = np.array(pairs, dtype=np.uint64).reshape(-1, 2)
    last, group = block_keys.last_of_equal(many)
    assert sorted(last.tolist()) == sorted({pair: number for number, pair in enumerate(pairs)}.values())
    assert (many[last][group] == many).all()
