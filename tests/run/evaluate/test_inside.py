"""Drafts and replay of a small untrained model, against decoding by hand."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.model import Model, load_model
from run.evaluate.decoding import Prompt, prefill
from run.evaluate.drafts import Step, arrays, judged, run_drafts
from run.evaluate.drafts_report import drafts_table, summaries
from run.evaluate.replay import compare, divergences
from run.evaluate.replay import summaries as replay_summaries
from tests.kernels.conftest import GOLDEN, one_thread

__all__ = ["one_thread"]  # used by every test
EOS = 1
MAX_TOKENS = 5
_SURE = [5.0, 5.0, 5.0, 5.0, 5.0]


@pytest.fixture(scope="module")
def mini() -> Model:
    return load_model(GOLDEN / "mini")


def prompt(row: str, num_tokens: int) -> Prompt:
    rng = random.Random(num_tokens)
    return Prompt(row, [rng.randrange(3, 240) for _ in range(num_tokens)], [])


def decode(model: Model, asked: Prompt, *, exact: bool) -> list[int]:
    """Greedy tokens one by one, without drafts."""
    pool = StatePool(model.config, 1, len(asked.tokens) + MAX_TOKENS)
    slot, logits = prefill(model, pool, asked, MAX_TOKENS, exact=exact)
    found = [int(logits.argmax())]
    while found[-1] != EOS and len(found) < MAX_TOKENS:
        batch = Batch.last_rows([(slot, pool.length(slot), found[-1:])])
        found.append(int(model.logits(model.forward(batch, pool)).argmax()))
    return found


@pytest.mark.parametrize(
    ("new", "num_right", "num_counted", "num_new"),
    [
        ([9], 0, 5, 1),
        ([7, 8, 9], 2, 5, 3),
        ([3, 4, 5, 6, 7, 8], 5, 5, 6),
        ([7, 8, EOS], 2, 5, 3),  # the target's own token ends it: the third draft was wrong
        ([7, EOS, 9], 2, 2, 2),  # a draft ends it
    ],
)
def test_a_step_is_judged(new: list[int], num_right: int, num_counted: int, num_new: int) -> None:
    assert judged("row", _SURE, new, EOS) == Step("row", _SURE, num_right, num_counted, num_new)


def test_drafts_give_as_many_tokens_as_plain_decoding(mini: Model) -> None:
    asked = [prompt("short", 7), prompt("long", 60)]
    done: list[None] = []
    steps = run_drafts(mini, asked, MAX_TOKENS, lambda: done.append(None))
    assert len(done) == 2 and {step.row for step in steps} == {"short", "long"}
    for one in asked:
        answer = decode(mini, one, exact=False)
        num = 1 + sum(step.num_new for step in steps if step.row == one.row)
        assert num >= len(answer) == MAX_TOKENS and num < MAX_TOKENS + 6
    raw, num_right, num_counted = arrays(steps)
    assert raw.shape == (len(steps), mini.config.dspark_block_size) and (num_right <= num_counted).all()


def test_figures_of_drafts() -> None:
    steps = [
        Step("a", _SURE, 5, 5, 6),
        Step("a", _SURE, 1, 5, 2),
        Step("b", _SURE, 1, 1, 1),  # ended by its first draft
    ]
    of_a, of_b, of_all = summaries(steps, None)
    assert (of_a["accepted_length"], of_b["accepted_length"], of_all["accepted_length"]) == (4.0, 1.0, 3.0)
    assert of_a["right"] == [1.0, 0.5, 0.5, 0.5, 0.5] and of_a["right_then"] == [1.0, 0.5, 1.0, 1.0, 1.0]
    assert of_b["right"] == [1.0, None, None, None, None]
    assert of_all["error"]["places"][1] == pytest.approx(0.9867 - 0.5, abs=1e-3)
    assert of_all["error_calibrated"] is None
    table = drafts_table([of_a, of_b, of_all], "drafts")
    assert table.row_count == 4  # and a line of errors by place
    assert summaries([], None) == []


def test_replay_against_the_exact_prompt(mini: Model) -> None:
    asked = [prompt("short", 15), *(prompt("long", num_tokens) for num_tokens in (40, 60))]
    found = compare(mini, asked, MAX_TOKENS)
    assert found[0].is_same and max(found[0].divergences) == 0.0  # no longer than a window: nothing is left out
    for one, told in zip(asked, found, strict=True):
        exact = decode(mini, one, exact=True)
        assert told.is_same is (decode(mini, one, exact=False) == exact)
        assert len(told.divergences) == len(exact)
    assert all(sum(told.divergences) > 0 for told in found[1:])
    short, long = replay_summaries(found)
    assert short["percent"] == 100 and short["kl"] == 0 and long["num"] == 2 and long["kl"] > 0


def test_divergence() -> None:
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert divergences(half, quarter) == pytest.approx([0.5 * (torch.tensor(4 / 3).log()).item()])
    assert divergences(half, half + 3) == pytest.approx([0.0])
