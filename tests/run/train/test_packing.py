"""Rows of conversations: where they begin, what is to be produced, what Engram sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from run.train.packing import ALIGN, starts
from tests.run.train.models import batch, loaded, sample


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_conversations_lie_in_order_aligned_and_apart(lengths: list[int]) -> None:
    found = starts(lengths, 512)
    ends = [*found[1:], 512]
    assert all(begin % ALIGN == 0 for begin in found)
    assert all(begin + length <= end for begin, length, end in zip(found, lengths, ends, strict=True))
    assert 512 - (found[-1] + lengths[-1]) < ALIGN


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="70 tokens do not fit into 64"):
        starts([70], 64)


def test_wanted_is_the_token_behind_each_place_of_the_decoder() -> None:
    first, second = sample(60, 1, num_targets=5), sample(70, 2, num_targets=6)
    whole = batch([first, second], columns=192)
    assert whole.wanted.tolist() == [*first.tokens[-5:].tolist(), *second.tokens[-6:].tolist()]
    assert torch.equal(whole.tokens.flatten()[whole.where + 1], whole.wanted)
    part = batch([first, second], columns=192, region=64)
    assert part.wanted.tolist() == second.tokens[-6:].tolist()
    assert torch.equal(part.where, whole.where[-6:] - 128)


def test_the_first_token_of_a_conversation_is_never_wanted() -> None:
    of = batch([sample(8, 1), sample(8, 2)], columns=64)
    assert len(of.wanted) == 14


def test_positions_and_history_begin_with_each_conversation() -> None:
    first, second = sample(16, 1), sample(10, 2)
    of = batch([first, second], columns=64)
    begin = starts([16, 10], 64)
    assert of.positions[0, begin[0] : begin[0] + 16].tolist() == list(range(16))
    assert of.lowest[0, begin[1] :].unique().tolist() == [begin[1]]
    ids = loaded().token_map.ids[torch.from_numpy(second.tokens.astype("int64"))].tolist()
    assert of.history[0, begin[1]].tolist() == [ids[0], -1, -1, -1]
    assert of.history[0, begin[1] + 5].tolist() == ids[5:1:-1]


def test_images_break_history() -> None:
    one = sample(12, 3)
    image = loaded().config.image_token_id
    assert image is not None
    one.tokens[4:6] = image
    of = batch([one], columns=64)
    begin = starts([12], 64)[0]
    assert of.is_image[0].nonzero()[:, 0].tolist() == [begin + 4, begin + 5]
    assert of.history[0, begin + 7, 1:].tolist()[1:] == [-1, -1]
