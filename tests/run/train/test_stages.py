"""The draft stages with gradients are those that serve: the same logits and confidence for the same taps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from kernels.batch import Batch as Segments
from kernels.batch import Segment
from kernels.cache import StatePool
from kernels.draft import Drafts
from kernels.engine import Sampling
from kernels.layout import Layout
from kernels.model import Model, load_model
from run.train.anchors import Anchors, choose
from run.train.layers import rounded_inputs
from run.train.packing import Batch
from run.train.stages import Stages
from tests.run.train.models import batch, loaded, sample
from tests.untrained import untrained

Compare = Callable[[Model, list[int], int], list[float]]
GREEDY = Sampling(0.0, 1.0, 0)
SIZE, WINDOW = 5, 128


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(untrained())


def anchored(of: Batch, positions: list[int]) -> Anchors:
    """The anchors of `of` at some positions."""
    every = choose(of, SIZE, WINDOW, 10_000, random.Random(0))
    chosen = [every.positions.tolist().index(position) for position in positions]
    return Anchors(*(part[chosen] for part in every))


def differences(of: Batch, taps: list[torch.Tensor], anchors: Anchors, served: list[Drafts]) -> list[float]:
    """How far logits and confidence of each block are from those `served`, at most."""
    stages, weights = Stages(loaded().config), loaded().parameters
    found = []
    with rounded_inputs(), torch.no_grad():
        hidden = stages.forward(weights, taps, of.positions, anchors).hidden
        for number, want in enumerate(served):
            before = torch.cat((anchors.tokens[number, :1], want.tokens[0, :-1]))
            logits, confidence = stages.head(weights, hidden[number], before)
            apart = (logits - want.logits[0]).abs().max(), (confidence - want.confidence[0]).abs().max()
            found.append(max(map(float, apart)))
    return found


def behind_taps(model: Model, positions: list[int], seed: int) -> list[float]:
    """`differences` of blocks behind random taps."""
    assert model.drafter is not None
    of = batch([sample(248)], columns=256)
    torch.manual_seed(seed)
    taps = [torch.randn(1, 256, model.config.hidden_size) for _ in model.config.dspark_target_layer_ids]
    anchors, served = anchored(of, positions), []
    for position, token in zip(positions, anchors.tokens[:, 0].tolist(), strict=True):
        pool = StatePool(model.config, num_slots=1, max_tokens=256, drafts=True)
        slot = pool.alloc()
        layout = Layout([Segment(slot, 0, position + 1)], pool)
        padding = (0, 0, 0, layout.padded - layout.num_rows)
        assert pool.taps is not None
        padded = [functional.pad(tap[0, 8 : 9 + position], padding).unsqueeze(1) for tap in taps]
        pool.taps.keep(padded, layout.taps, model.drafter.observe)
        pool.advance(slot, position + 1)
        served.append(model.drafter.draft([(slot, token)], [GREEDY], pool))
    return differences(of, taps, anchors, served)


def behind_prompt(model: Model, positions: list[int], seed: int) -> list[float]:
    """The same behind the taps that both make themselves of the same tokens."""
    assert model.drafter is not None
    conversation = sample(90, seed)
    of = batch([conversation], columns=128)
    with rounded_inputs(), torch.no_grad():
        taps = loaded().backbone.forward(loaded().parameters, of, None, select=True, probe=0).taps
    anchors, served = anchored(of, positions), []
    for position in positions:
        pool = StatePool(model.config, num_slots=1, max_tokens=256, drafts=True)
        slot = pool.alloc()
        *tokens, following = conversation.tokens[: position + 2].tolist()
        model.forward(Segments.last_rows([(slot, 0, tokens)]), pool)
        served.append(model.drafter.draft([(slot, following)], [GREEDY], pool))
    return differences(of, taps, anchors, served)


@pytest.mark.parametrize(
    ("compare", "positions"),
    [
        (behind_taps, [0, 3, 127, 128, 201]),  # windows that begin, are full, and have gone round the ring
        (behind_prompt, [5, 20, 40]),
    ],
)
def test_blocks_are_those_that_are_served(model: Model, compare: Compare, positions: list[int]) -> None:
    """Sums in another order can tip a value that is rounded, and then all blocks that see it differ: so each position
    has three chances. Logits are about ten."""
    each = [compare(model, positions, seed) for seed in (1, 2, 3)]
    assert all(min(of_position) < 1e-4 for of_position in zip(*each, strict=True)), each


def test_anchors() -> None:
    """Two answers of 7 and 2 tokens in one row, of which the decoder sees a part."""
    of = batch([sample(200, 1, 7), sample(40, 2, 2)], columns=256, region=128, cut=150)
    every = choose(of, SIZE, WINDOW, 100, random.Random(0))
    # The first ends at column 216, the second at 256. Behind the anchor follows a token, then one that counts at least.
    assert every.place.tolist() == [80, 81, 82, 83, 84, 85, 125]
    assert every.positions.tolist() == [192, 193, 194, 195, 196, 197, 37]
    assert every.counted.sum(1).tolist() == [5, 5, 4, 3, 2, 1, 1]
    row = of.tokens[0]
    assert every.tokens[0].tolist() == row[209:215].tolist() and every.tokens[6, :2].tolist() == row[254:].tolist()
    assert every.window[0, -1] == 80 and every.window.shape == (7, WINDOW)
    assert every.window[every.seen][:59].tolist() == list(range(22, 81))  # from the cut on, column 150
    assert every.seen.sum(1).tolist() == [59, 60, 61, 62, 63, 64, 38]
    few = choose(of, SIZE, WINDOW, 3, random.Random(0))
    assert len(few.place) == 3 and set(few.place.tolist()) < set(every.place.tolist())
