"""The names of blocks that fill up while a request generates: those that its whole text has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from actors.decode.blocks import Filling
from actors.decode.slots import Generation
from actors.rules.chain import BLOCK_TOKENS, Span, chain, root, tail_digests
from schemas.cache import ChainEnd
from schemas.request import Finished, FinishReason
from tests.actors.builders import hand_over
from tests.actors.core import info

ROOT = root("timed", b"tenant")
EOS = 1


def chain_end(prompt: np.ndarray[tuple[int], np.dtype[np.uint32]], images: list[Span]) -> ChainEnd:
    keys = [ROOT, *chain(ROOT, prompt, images)]
    tail = prompt[len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS :]
    digests = tail_digests(images, len(prompt))
    return ChainEnd(space="timed", key=keys[-1], tokens=tail.astype("<u4").tobytes(), digests=digests)


@settings(deadline=None, max_examples=150)
@given(
    num_prompt=st.integers(1, 400),
    num_output=st.integers(1, 600),
    longest_step=st.sampled_from([1, 6, 40, 300]),
    image=st.none() | st.tuples(st.integers(0, 200), st.integers(1, 200)),
    eos_at=st.none() | st.integers(0, 600),
    max_tokens=st.integers(1, 600) | st.just(600),
    seed=st.integers(0, 99),
)
@example(num_prompt=200, num_output=300, longest_step=6, image=(5, 20), eos_at=None, max_tokens=600, seed=1)
def test_keys_are_those_of_the_whole_text(
    num_prompt: int,
    num_output: int,
    longest_step: int,
    image: tuple[int, int] | None,
    eos_at: int | None,
    max_tokens: int,
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    steps: list[list[int]] = []
    while sum(map(len, steps)) < num_output:
        steps.append(draw.integers(2, 2**32, draw.integers(1, longest_step + 1)).tolist())
    prompt = np.arange(7, 7 + num_prompt, dtype=np.uint32)
    images = []
    if image is not None and sum(image) <= num_prompt:  # so far before the end of the prompt, and so long
        images.append(Span(num_prompt - sum(image), image[1], b"digest of it"))
    offer = structs.replace(hand_over(num_tokens=num_prompt, max_tokens=max_tokens), chain=chain_end(prompt, images))
    generation = Generation(offer)
    filling = generation.filling = Filling.of(offer, info(block_bytes=77))
    assert filling is not None and (filling.space, filling.block_bytes) == ("timed", 77)
    named: list[int] = []
    num_sampled = 0
    for step in steps:
        if eos_at is not None and num_sampled <= eos_at < num_sampled + len(step):
            step = [*step[: eos_at - num_sampled], EOS, *step[eos_at - num_sampled + 1 :]]
        num_sampled += len(step)
        generation.advance(step, EOS, 10_000)
        has_filled = filling.take(generation.tokens, generation.num_computed)
        new = filling.blocks(filling.num_done)
        assert has_filled == bool(new) and filling.blocks(filling.num_done) == []
        named += new
        if generation.end is not None:
            break
    # The engine has fed all that it sampled but the last.
    num_computed = min(len(generation.tokens), num_sampled - 1)
    assert generation.num_computed == num_computed
    text = np.concatenate([prompt, np.array(generation.tokens[:num_computed], dtype=np.uint32)])
    keys = chain(ROOT, text, images)
    first = num_prompt // BLOCK_TOKENS
    assert named == list(range(first, len(keys)))
    assert [filling.key(number) for number in named] == keys[first:]
    assert filling.key(first - 1) == (keys[first - 1] if first else ROOT)
    ends = [number for number in (len(keys), len(keys) - 1) if number > first]
    assert filling.windows() == [(number, number * BLOCK_TOKENS) for number in ends]


@pytest.mark.parametrize(
    "change",
    [
        {"space": "another"},
        {"tokens": bytes(4 * 4)},
        {"tokens": bytes(4 * 6)},
        {"tokens": bytes(4 * (5 + BLOCK_TOKENS))},
    ],
)
def test_a_chain_that_does_not_fit_is_none(change: dict[str, object]) -> None:
    end = chain_end(np.arange(5, dtype=np.uint32), [])
    offer = structs.replace(hand_over(num_tokens=5), chain=end)
    assert Filling.of(offer, info()) is not None
    assert Filling.of(hand_over(num_tokens=5), info()) is None
    assert Filling.of(structs.replace(offer, chain=structs.replace(end, **change)), info()) is None


@pytest.mark.parametrize(
    ("new", "num_computed", "end"),
    [
        ([5, 6, 7], 2, None),
        ([5, EOS], 1, Finished(reason=FinishReason.STOP)),
        ([5, EOS, 9], 1, Finished(reason=FinishReason.STOP)),
        ([EOS], 0, Finished(reason=FinishReason.STOP)),
        ([5, 6, 7, 8], 3, Finished(reason=FinishReason.LENGTH)),
        ([5, 6, 7, 8, 9], 4, Finished(reason=FinishReason.LENGTH)),
    ],
)
def test_what_was_sampled_last_is_not_computed_yet(new: list[int], num_computed: int, end: Finished | None) -> None:
    generation = Generation(hand_over(max_tokens=4))
    generation.advance(new, EOS, 100)
    assert (generation.num_computed, generation.end) == (num_computed, end)


@pytest.mark.parametrize("num_prompt", [1, 127, 128, 200])
def test_wherever_it_is_moved_each_block_is_named_once_by_one_of_both(num_prompt: int) -> None:
    """Of the last token that the first one has, the second one computes what is cached: also when it fills a block."""
    prompt = np.arange(7, 7 + num_prompt, dtype=np.uint32)
    images = [Span(num_prompt - 1, 1, b"digest of it")]
    output = np.random.default_rng(1).integers(2, 2**32, 300).tolist()
    first = structs.replace(hand_over(num_tokens=num_prompt, max_tokens=900), chain=chain_end(prompt, images), epoch=3)
    whole = np.concatenate([prompt, np.array(output, dtype=np.uint32)])
    for num_before in range(len(output)):
        generations, keys = [Generation(first)], []
        for part in (output[:num_before], output[num_before:]):
            one = generations[-1]
            filling = one.filling = Filling.of(one.offer, info())
            assert filling is not None
            if part:
                one.advance(part, EOS, 10_000)
                filling.take(one.tokens, one.num_computed)
            keys += [(number, filling.key(number)) for number in filling.blocks(filling.num_done if part else 0)]
            one.epoch = 4
            generations.append(Generation(one.hand_over()))
        offer = generations[1].offer
        assert (offer.num_output, offer.num_tokens, offer.epoch) == (num_before, num_prompt + num_before, 4)
        wanted = list(enumerate(chain(ROOT, whole, images)))
        assert generations[0].hand_over(is_whole=False).chain is None
        assert keys == wanted[num_prompt // BLOCK_TOKENS : (len(whole) - 1) // BLOCK_TOKENS]
