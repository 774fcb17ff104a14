"""The hit rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rules.chain import BLOCK_TOKENS
from actors.rules.hit import Hit, exact_ends, hit, usable_blocks


@pytest.mark.parametrize(
    ("num_present", "num_tokens", "at_end", "one_before", "without"),
    [
        (0, 1000, Hit(), Hit(), Hit()),
        (5, 127, Hit(), Hit(), Hit()),
        (5, 128, Hit(), Hit(), Hit()),
        (5, 255, Hit(), Hit(), Hit()),
        (5, 256, Hit(1, 128), Hit(), Hit()),
        (1, 5000, Hit(1, 128), Hit(), Hit()),
        (5, 384, Hit(2, 256), Hit(1, 128), Hit(2, 128)),
        (5, 767, Hit(4, 512), Hit(3, 384), Hit(4, 384)),
        (5, 768, Hit(5, 640), Hit(4, 512), Hit(5, 512)),
        (5, 5000, Hit(5, 640), Hit(4, 512), Hit(5, 512)),
    ],
)
def test_by_hand(num_present: int, num_tokens: int, at_end: Hit, one_before: Hit, without: Hit) -> None:
    usable = usable_blocks(num_present, num_tokens)
    assert hit(num_present, num_tokens, {usable, usable - 1}) == at_end
    assert hit(num_present, num_tokens, {usable}) == at_end
    assert hit(num_present, num_tokens, {usable - 1}) == one_before
    assert hit(num_present, num_tokens) == without
    assert hit(num_present, num_tokens, {usable + 1, usable - 2}) == without, "windows of elsewhere are none"


@given(st.integers(0, 9000), st.integers(1, 1_100_000), st.booleans(), st.booleans())
def test_laws(num_present: int, num_tokens: int, at_end: bool, one_before: bool) -> None:
    usable = usable_blocks(num_present, num_tokens)
    snapshots = {number for number, there in ((usable, at_end), (usable - 1, one_before)) if there}
    found = hit(num_present, num_tokens, snapshots)
    assert found.num_blocks in (0, usable, usable - 1)
    assert found.start % BLOCK_TOKENS == 0 and found.num_replayed in (0, BLOCK_TOKENS)
    # Never everything, never windows out of nothing; a lost snapshot costs a block and no more.
    assert num_tokens - found.start >= min(num_tokens, BLOCK_TOKENS)
    assert found.num_replayed == 0 or not snapshots
    assert found.num_replayed or found.num_blocks == 0 or found.num_blocks in snapshots
    best = hit(num_present, num_tokens, {usable})
    assert 0 <= best.start - found.start <= BLOCK_TOKENS
    # Windows one block earlier never cost more than a replay.
    assert hit(num_present, num_tokens, {usable - 1}).start == hit(num_present, num_tokens).start


@given(st.integers(0, 100))
def test_the_windows_that_are_wanted_are_those_that_are_used(num_usable: int) -> None:
    num_tokens = (num_usable + 1) * BLOCK_TOKENS
    used = [n for n in range(num_usable, 0, -1) if hit(num_usable, num_tokens, {n}).num_replayed == 0]
    assert exact_ends(num_usable) == [n for n in used if hit(num_usable, num_tokens, {n}).num_blocks == n]
