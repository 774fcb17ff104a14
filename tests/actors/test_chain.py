"""Block keys: what each of them depends on, and that nothing else does."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rules.chain import BLOCK_TOKENS, KEY_BYTES, Span, chain, link, root, tail_digests

ROOT = root("model-1/layout-1")
DIGESTS = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(4)]


def tokens(num_tokens: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 129_280, num_tokens).astype(np.uint32)


def by_the_formula(root: bytes, prompt: npt.NDArray[np.uint32]) -> list[bytes]:
    keys, key = [], root
    for start in range(0, len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        words = b"".join(int(token).to_bytes(4, "little") for token in prompt[start : start + BLOCK_TOKENS])
        key = hashlib.sha256(key + words).digest()[:16]
        keys.append(key)
    return keys


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 255, 256, 1000])
def test_complete_blocks_by_the_formula(num_tokens: int) -> None:
    keys = chain(ROOT, tokens(num_tokens))
    assert keys == by_the_formula(ROOT, tokens(num_tokens))
    assert len(keys) == num_tokens // 128 and all(len(key) == KEY_BYTES for key in keys)


def test_golden_keys() -> None:
    """These name blocks on disk: another value is another layout."""
    assert ROOT.hex() == "2e101a24ce1ab1975fe2d18ff8ef6457"
    assert chain(ROOT, np.arange(256, dtype=np.uint32))[-1].hex() == "b40df3bef5689da1909f6fc32b048d3b"


@given(st.integers(1, 6), st.data())
def test_a_changed_token_changes_its_block_and_all_behind_it(num_blocks: int, data: st.DataObject) -> None:
    prompt = tokens(128 * num_blocks)
    at = data.draw(st.integers(0, len(prompt) - 1))
    before = chain(ROOT, prompt)
    prompt[at] ^= 1 << data.draw(st.integers(0, 16))
    after = chain(ROOT, prompt)
    assert [one == other for one, other in zip(before, after, strict=True)] == [
        block < at // 128 for block in range(num_blocks)
    ]


def test_a_prefix_has_the_keys_of_the_whole() -> None:
    assert chain(ROOT, tokens(700))[:3] == chain(ROOT, tokens(700)[:400])


def test_spaces_do_not_meet() -> None:
    roots = [root("m/l"), root("m2/l"), root("m/l2"), root("m/l", b"a"), root("m/l", b"b"), root("m/", b"l")]
    assert len({chain(one, tokens(128))[0] for one in roots}) == len(roots)


def test_a_chain_goes_on_where_it_ended() -> None:
    """As decode does, from the last complete block of a prompt and what is behind it."""
    prompt = tokens(640)
    images = [Span(130, 20, DIGESTS[0]), Span(250, 8, DIGESTS[1]), Span(259, 20, DIGESTS[2])]
    whole = chain(ROOT, prompt, images)
    for num_tokens in (279, 300, 511):
        known = chain(ROOT, prompt[:num_tokens], images)
        number = len(known)
        block = prompt[128 * number : 128 * (number + 1)].tobytes()
        assert link(known[-1], block, tail_digests(images, num_tokens)) == whole[number]
    assert tail_digests([Span(250, 6, DIGESTS[0])], 300) == b"", "it ends with the block before"


def test_images_are_in_the_blocks_that_they_overlap() -> None:
    prompt = tokens(640)
    plain = chain(ROOT, prompt)
    for start, num_tokens, first in ((0, 1, 0), (127, 1, 0), (127, 2, 0), (128, 300, 1), (500, 140, 3), (639, 1, 4)):
        keys = chain(ROOT, prompt, [Span(start, num_tokens, DIGESTS[0])])
        assert [one == other for one, other in zip(keys, plain, strict=True)] == [n < first for n in range(5)]
    # Which image, and where: not only that there is one.
    one, two = (chain(ROOT, prompt, [Span(130, 20, digest)]) for digest in DIGESTS[:2])
    assert one[0] == two[0] and one[1] != two[1]
    longer = chain(ROOT, prompt, [Span(130, 200, DIGESTS[0])])
    assert longer[1] == one[1] and longer[2] != one[2]


def test_an_image_beyond_the_last_complete_block_is_none_of_theirs() -> None:
    prompt = tokens(300)
    assert chain(ROOT, prompt, [Span(256, 44, DIGESTS[0])]) == chain(ROOT, prompt)
    assert len(chain(ROOT, prompt, [Span(200, 100, DIGESTS[0])])) == 2
