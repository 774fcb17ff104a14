"""Images in prompts, in any cut and any company, in replay and in what drafts read; golden numbers: tests/oracle."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from kernels.batch import Batch, Images
from kernels.cache import StatePool
from kernels.checkpoint import Checkpoint
from kernels.config import ModelConfig
from kernels.model import Model, load_model
from kernels.ops.experts import Routes, route
from kernels.vocabulary import load_token_map
from tests.kernels.conftest import GOLDEN
from tests.kernels.test_invariance import assert_same_state
from tests.kernels.vision_set import FOLDER, PROMPTS, Dtype, images, tokens


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def model_bf16() -> Model:
    return load_model(FOLDER, compute_dtype="bf16")


@pytest.fixture
def pool(model: Model) -> StatePool:
    return StatePool(model.config, num_slots=6, max_tokens=160)


def compute(model: Model, pool: StatePool, slot: int, some: list[int], given: Images) -> torch.Tensor:
    return model.logits(model.forward(Batch.all_rows([(slot, pool.length(slot), some)], given), pool))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_any_cut_is_one_shot(model: Model, model_bf16: Model, pool: StatePool, dtype: Dtype, seed: int) -> None:
    """Also one through the middle of an image; and the prompt ends in decode rows."""
    chosen, rng = model if dtype == "fp32" else model_bf16, random.Random(seed)
    for prompt in ("v2", "v3"):
        some, slot, other = tokens(prompt), pool.alloc(), pool.alloc()
        want = compute(chosen, pool, slot, some, images(prompt, slot, dtype))
        parts = []
        while (start := pool.length(other)) < len(some):
            piece = some[start : start + rng.choice([1, 2, 3, 7, 16])]
            parts.append(compute(chosen, pool, other, piece, images(prompt, other, dtype)))
        assert torch.equal(torch.cat(parts), want)
        assert_same_state(pool.export(other), pool.export(slot))


@pytest.mark.parametrize("seed", range(2))
def test_a_mixed_batch_is_each_request_alone(model: Model, pool: StatePool, seed: int) -> None:
    rng, alone = random.Random(seed), {}
    for prompt in PROMPTS:
        alone[prompt] = compute(model, pool, slot := pool.alloc(), tokens(prompt), images(prompt, slot))
        pool.free(slot)
    slots, parts = {prompt: pool.alloc() for prompt in PROMPTS}, {prompt: [] for prompt in PROMPTS}
    given = {slot: images(prompt, slot)[slot] for prompt, slot in slots.items()}
    while left := [prompt for prompt in PROMPTS if pool.length(slots[prompt]) < len(tokens(prompt))]:
        runs = []
        for prompt in rng.sample(left, len(left)):
            start = pool.length(slots[prompt])
            runs.append((slots[prompt], start, tokens(prompt)[start : start + rng.choice([1, 1, 6, 19])]))
        logits = model.logits(model.forward(Batch.all_rows(runs, given), pool))
        owners = {slot: prompt for prompt, slot in slots.items()}
        for (slot, _, piece), rows in zip(runs, logits.split([len(run[2]) for run in runs]), strict=True):
            parts[owners[slot]].append(rows)
            assert len(rows) == len(piece)
    for prompt in PROMPTS:
        assert torch.equal(torch.cat(parts[prompt]), alone[prompt])


def test_embeddings_are_read_each_of_them(model: Model, pool: StatePool) -> None:
    """One changed value anywhere in a span, or a span that is not given, changes what comes behind, nothing before."""
    some, slot = tokens("v2"), pool.alloc()
    right = images("v2", slot)
    want = compute(model, pool, slot, some, right)
    pool.free(slot)
    for number, (start, rows) in enumerate(right[slot]):
        for row in (0, len(rows) // 2, len(rows) - 1):
            wrong = rows.copy()
            wrong[row, 5] += 1.0
            given = [*right[slot]]
            given[number] = (start, wrong)
            got = compute(model, pool, slot := pool.alloc(), some, {slot: given})
            pool.free(slot)
            assert torch.equal(got[: start + row], want[: start + row])
            assert not torch.equal(got[start + row], want[start + row])
    got = compute(model, pool, slot := pool.alloc(), some, {})
    first = right[slot][0][0]
    assert torch.equal(got[:first], want[:first]) and not torch.equal(got[first], want[first])


def test_rows_of_images_are_routed_and_dead_whatever_their_embedding(model: Model, pool: StatePool) -> None:
    """The tokens alone decide that: with the embedding of a text token in place, picks and memory still differ."""
    some, slot = tokens("v1"), pool.alloc()
    place = some.index(187)
    plain = model.embed[some[0]].numpy()[None]
    traces: list[dict[str, torch.Tensor]] = [{}, {}]
    ran = [(some[:place] + [187], {slot: [(place, plain)]}), ([*some[:place], some[0]], {})]
    for (prompt, given), trace in zip(ran, traces, strict=True):
        model.forward(Batch.all_rows([(slot, 0, prompt)], given), pool, trace)
        pool.free(slot)
        assert pool.alloc() == slot
    image, text = traces
    assert torch.equal(image["embed_expanded_in"], text["embed_expanded_in"])
    assert torch.equal(image["layers.0.in_after_engram"][-1], image["embed_expanded_in"][-1])
    assert not torch.equal(text["layers.0.in_after_engram"][-1], text["embed_expanded_in"][-1])


def test_text_alone_costs_nothing_more(model: Model, pool: StatePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk without image tokens is routed by one bias, also of a prompt that has images elsewhere."""
    seen: list[int] = []

    def spy(logits: torch.Tensor, bias: torch.Tensor, num_picks: int, factor: float) -> Routes:
        seen.append(bias.dim())
        return route(logits, bias, num_picks, factor)

    monkeypatch.setattr("kernels.moe.route", spy)
    slot, num_layers = pool.alloc(), model.config.num_hidden_layers
    for piece in (tokens("v1")[:4], tokens("v1")[4:-1], tokens("v1")[-1:]):
        compute(model, pool, slot, piece, images("v1", slot))
    assert seen == [1] * num_layers + [2] * num_layers + [1] * num_layers


# What the checkpoint with a tower lacks, drafts and layers behind the last KV owner, the other one has.


@pytest.fixture(scope="module")
def drafting() -> Model:
    base, vision = ModelConfig.from_folder(GOLDEN / "mini"), ModelConfig.from_folder(FOLDER).vision
    config = dataclasses.replace(base, vision=vision, image_token_id=251)
    return Model(config, Checkpoint(GOLDEN / "mini"), load_token_map(GOLDEN / "mini", config), "fp32")


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("length", [70, 83])
def test_replay_and_windows_of_drafts_at_any_cut(drafting: Model, bounded: bool, length: int) -> None:
    """The last window begins within an image."""
    rng = random.Random(length)
    spans = [(9, 14), (length - 25, 15)]
    prompt = [rng.randrange(250) for _ in range(length)]
    given = []
    for start, num in spans:
        prompt[start : start + num] = [251] * num
        rows = np.random.default_rng(start).normal(size=(num, drafting.config.hidden_size)) * 0.1
        given.append((start, rows.astype(np.float32)))
    pool = StatePool(drafting.config, num_slots=2, max_tokens=100, drafts=True)
    found = []
    for steps in ([length], [5, 7, 1, 1, 20, 3, 16, 1, 50]):
        slot = pool.alloc()
        if bounded:
            pool.plan_replay(slot, length)
        for step in steps:
            start = pool.length(slot)
            if piece := prompt[start : start + step]:
                hidden = drafting.forward(Batch.last_rows([(slot, start, piece)], {slot: given}), pool)
        found.append((drafting.logits(hidden), pool.export(slot)))
        pool.free(slot)
    (want, state), (got, other) = found
    assert torch.equal(got, want) and not bool(got.isnan().any())
    assert_same_state(other, state)
