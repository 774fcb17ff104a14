"""The hit rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rules.chain import BLOCK_TOKENS
from actors.rules.hit import Hit, hit, usable_blocks


@pytest.mark.parametrize(
    ("num_present", "num_tokens", "with_snapshot", "without"),
    [
        (0, 1000, Hit(), Hit()),
        (5, 127, Hit(), Hit()),
        (5, 128, Hit(), Hit()),
        (5, 255, Hit(), Hit()),
        (5, 256, Hit(1, 128), Hit()),
        (1, 5000, Hit(1, 128), Hit()),
        (5, 384, Hit(2, 256), Hit(2, 128)),
        (5, 767, Hit(4, 512), Hit(4, 384)),
        (5, 768, Hit(5, 640), Hit(5, 512)),
        (5, 5000, Hit(5, 640), Hit(5, 512)),
    ],
)
def test_by_hand(num_present: int, num_tokens: int, with_snapshot: Hit, without: Hit) -> None:
    assert hit(num_present, num_tokens, has_snapshot=True) == with_snapshot
    assert hit(num_present, num_tokens, has_snapshot=False) == without


@given(st.integers(0, 9000), st.integers(1, 1_100_000), st.booleans())
def test_laws(num_present: int, num_tokens: int, has_snapshot: bool) -> None:
    found = hit(num_present, num_tokens, has_snapshot=has_snapshot)
    assert found.num_blocks in (0, usable_blocks(num_present, num_tokens))
    assert found.start % BLOCK_TOKENS == 0 and found.num_replayed in (0, BLOCK_TOKENS)
    # Never everything, never windows out of nothing; a lost snapshot costs a block and no more.
    assert num_tokens - found.start >= min(num_tokens, BLOCK_TOKENS)
    assert found.num_replayed == 0 or not has_snapshot
    best = hit(num_present, num_tokens, has_snapshot=True)
    assert best.start - found.start <= BLOCK_TOKENS
