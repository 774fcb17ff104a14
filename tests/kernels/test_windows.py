"""Window rows at the ends of blocks, read long after they were passed: which are there, and that they are right."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.model import Model
from tests.kernels.test_invariance import assert_same_state
from tests.kernels.test_replay import State, prefix, prompt_of

WINDOW, DRAFTS, LENGTH = 16, 5, 256
Windows = dict[int, torch.Tensor]


def feed(model: Model, pool: StatePool, slot: int, tokens: list[int]) -> torch.Tensor:
    return model.logits(model.forward(Batch.all_rows([(slot, pool.length(slot), tokens)]), pool))


@pytest.fixture
def pool(mini: Model) -> StatePool:
    return StatePool(mini.config, 3, LENGTH, DRAFTS, drafts=True)


@pytest.fixture
def prompt() -> list[int]:
    return prompt_of(LENGTH)


@pytest.fixture
def want(mini: Model, pool: StatePool, prompt: list[int]) -> Windows:
    """What they are when the end has just been reached: the last rows of an export."""
    slot, found = pool.alloc(), {}
    for end in (128, 256):
        feed(mini, pool, slot, prompt[end - 128 : end])
        found[end] = pool.export(slot)["swa"][: mini.config.first_decoder_layer]
    pool.free(slot)
    return found


def check(pool: StatePool, slot: int, want: Windows, present: list[int]) -> None:
    for end, rows in want.items():
        found = pool.windows(slot, end)
        assert (found is not None) == (end in present), end
        if found is not None:
            assert torch.equal(found, rows)


def test_long_after_the_end_was_passed(mini: Model, pool: StatePool, prompt: list[int], want: Windows) -> None:
    slot = pool.alloc()
    for end in (*range(126, 132), *range(140, 250, 11), *range(250, 257)):
        feed(mini, pool, slot, prompt[pool.length(slot) : end])
        check(pool, slot, want, [end for end in want if end <= pool.length(slot)])


def test_the_last_two_ends_are_there_at_every_length(mini: Model) -> None:
    pool = StatePool(mini.config, 1, 1024, DRAFTS)
    slot = pool.alloc()
    for length in range(1, 700):
        pool.advance(slot, 1)
        pool.advance(slot, DRAFTS)
        pool.truncate(slot, length)
        last = length // 128 * 128
        for end in {last, max(last - 128, 0)}:
            assert pool.windows(slot, end) is not None, (length, end)
        assert pool.windows(slot, last + 128) is None


@pytest.mark.parametrize("seed", range(2))
def test_what_is_taken_back_is_not_read(
    mini: Model, pool: StatePool, prompt: list[int], want: Windows, seed: int
) -> None:
    """Drafts across the ends of blocks, accepted in part: before them, behind them, exactly there."""
    rng, slot = random.Random(seed), pool.alloc()
    feed(mini, pool, slot, prompt[:110])
    while (length := pool.length(slot)) < LENGTH:
        right = prompt[length : length + rng.randrange(1, DRAFTS + 1)]
        wrong = prompt_of(min(DRAFTS, LENGTH - length), length)[len(right) :]
        feed(mini, pool, slot, right + wrong)
        pool.truncate(slot, length + len(right))
        check(pool, slot, want, [end for end in want if end <= pool.length(slot)])


def test_they_are_gone_when_the_ring_has_come_round(mini: Model) -> None:
    """Also when that was for tokens that were taken back."""
    pool = StatePool(mini.config, 1, 1024, DRAFTS)
    for length, taken_back, present in ((384, 0, True), (389, 0, True), (390, 0, False), (391, 3, False)):
        slot = pool.alloc()
        pool.advance(slot, length)
        pool.truncate(slot, length - taken_back)
        pool.advance(slot, 1)
        assert (pool.windows(slot, 128) is not None) == present, length
        assert pool.windows(slot, 256) is not None and pool.windows(slot, 384) is not None
        assert pool.windows(slot, 512) is None
        pool.free(slot)


@pytest.mark.parametrize("length", [127, 128, 129, 200])
def test_behind_an_import_only_what_is_computed_then(
    mini: Model, pool: StatePool, prompt: list[int], want: Windows, length: int
) -> None:
    source, slot = pool.alloc(), pool.alloc()
    feed(mini, pool, source, prompt[:length])
    pool.import_(slot, pool.export(source))
    check(pool, slot, want, [128] if length == 128 else [])
    feed(mini, pool, slot, prompt[length:])
    check(pool, slot, want, [128, 256] if length <= 128 else [256])


def test_behind_a_replay_only_what_is_computed_then(
    mini: Model, pool: StatePool, prompt: list[int], want: Windows
) -> None:
    source, slot = pool.alloc(), pool.alloc()
    feed(mini, pool, source, prompt)
    cached = prefix(pool.export(source), mini, 128)
    pool.import_prefix(slot, cached)
    check(pool, slot, want, [])
    feed(mini, pool, slot, prompt[128 - WINDOW : 128])
    rows = pool.windows(slot, 128)
    assert rows is not None and not torch.equal(rows, want[128])  # they come from a truncated window: approximate
    pool.free(slot)
    slot = pool.alloc()
    pool.import_prefix(slot, cached | {"swa": want[128]})
    check(pool, slot, want, [128])
    feed(mini, pool, slot, prompt[128:])
    # Its decoder began at the end of the prefix, and no replay: layers before it know no difference.
    check(pool, slot, want, [128, 256])


def test_a_prompt_goes_on_from_windows_with_the_same_bits(
    mini: Model, mini_bf16: Model, pool: StatePool, prompt: list[int]
) -> None:
    """Every row from there on, the state and the drafts; in both compute modes, at any length that is left."""
    for model in (mini, mini_bf16):
        for length in (144, 145, 200, 255):
            source, slot = pool.alloc(), pool.alloc()
            pool.plan_replay(source, length)
            rows = feed(model, pool, source, prompt[:length])
            state = pool.export(source)
            windows = pool.windows(source, 128)
            assert windows is not None
            pool.import_prefix(slot, prefix(state, model, 128) | {"swa": windows})
            pool.plan_replay(slot, length)
            got = feed(model, pool, slot, prompt[128:length])
            assert torch.equal(got.nan_to_num(7.0), rows[128:].nan_to_num(7.0))
            assert_same_state(pool.export(slot), state)
            assert torch.equal(feed(model, pool, slot, [9]), feed(model, pool, source, [9]))
            for used in (source, slot):
                pool.free(used)


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_every_layer_of_them_is_read(mini: Model, pool: StatePool, prompt: list[int], layer: int) -> None:
    source = pool.alloc()
    feed(mini, pool, source, prompt)
    cached: State = prefix(pool.export(source), mini, 128)
    windows = pool.windows(source, 128)
    assert windows is not None and len(windows) == mini.config.first_decoder_layer == 6
    altered = windows.clone()
    altered[layer, :, :64] ^= 0x80  # every sign
    rows = []
    for each in (windows, altered):
        slot = pool.alloc()
        pool.import_prefix(slot, cached | {"swa": each})
        rows.append(feed(mini, pool, slot, prompt[128:160])[0])
        pool.free(slot)
    assert not torch.equal(*rows)
    slot = pool.alloc()
    with pytest.raises(ValueError, match=r"imported swa is torch.uint8 \[5, 15, 66\]"):
        pool.import_prefix(slot, cached | {"swa": windows[1:]})
    assert pool.length(slot) == 0
