"""A row's bits depend on its own request only: not on the batch, the cuts, the threads, or drafts taken back."""

import random

import pytest
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.model import Model

LENGTH = 83  # odd; more than five windows, more than the candidates hold


@pytest.fixture(params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, mini: Model, mini_bf16: Model) -> Model:
    return mini if request.param == "fp32" else mini_bf16


@pytest.fixture
def prompt() -> list[int]:
    return [random.Random(5).randrange(256) for _ in range(LENGTH)]


def feed(model: Model, pool: StatePool, slot: int, tokens: list[int]) -> torch.Tensor:
    return model.logits(model.forward(Batch.all_rows([(slot, pool.length(slot), tokens)]), pool))


def once(model: Model, pool: StatePool, tokens: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    slot = pool.alloc()
    logits = feed(model, pool, slot, tokens)
    state = pool.export(slot)
    pool.free(slot)
    return logits, state


def assert_same_state(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("seed", range(4))
def test_any_cut_is_one_shot(model: Model, pool: StatePool, prompt: list[int], seed: int) -> None:
    want, state = once(model, pool, prompt)
    rng = random.Random(seed)
    slot, parts = pool.alloc(), []
    while pool.length(slot) < LENGTH:
        start = pool.length(slot)
        parts.append(feed(model, pool, slot, prompt[start : start + rng.choice([1, 2, 3, 7, 16, 17, 31])]))
    assert torch.equal(torch.cat(parts), want)
    assert_same_state(pool.export(slot), state)


def test_decode_is_prefill(model: Model, pool: StatePool, prompt: list[int]) -> None:
    want, state = once(model, pool, prompt)
    slot = pool.alloc()
    assert torch.equal(torch.cat([feed(model, pool, slot, [token]) for token in prompt]), want)
    assert_same_state(pool.export(slot), state)


@pytest.mark.parametrize("seed", range(2))
def test_a_mixed_batch_is_each_request_alone(model: Model, pool: StatePool, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 9, 30, 57, LENGTH)]
    alone = [once(model, pool, tokens) for tokens in prompts]
    slots = [pool.alloc() for _ in prompts]
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(pool.length(slot) < len(tokens) for slot, tokens in zip(slots, prompts, strict=True)):
        runs, owners = [], []
        for number in rng.sample(range(len(prompts)), len(prompts)):
            start = pool.length(slots[number])
            tokens = prompts[number][start : start + rng.choice([0, 1, 1, 1, 5, 12, 20])]
            if tokens:
                runs.append((slots[number], start, tokens))
                owners.append(number)
        if not runs:
            continue
        logits = model.logits(model.forward(Batch.all_rows(runs), pool))
        for number, rows in zip(owners, logits.split([len(run[2]) for run in runs]), strict=True):
            parts[number].append(rows)
    for number, (want, state) in enumerate(alone):
        assert torch.equal(torch.cat(parts[number]), want)
        assert_same_state(pool.export(slots[number]), state)


def test_two_threads_give_the_bits_of_one(model: Model, pool: StatePool, prompt: list[int]) -> None:
    want, state = once(model, pool, prompt)
    torch.set_num_threads(2)
    slot, other = pool.alloc(), pool.alloc()
    first = feed(model, pool, slot, prompt[:-1])
    batch = Batch.last_rows([(other, 0, prompt[:40]), (slot, LENGTH - 1, prompt[-1:])])
    last = model.logits(model.forward(batch, pool))
    assert torch.equal(torch.cat((first, last[1:])), want) and torch.equal(last[0], want[39])
    assert_same_state(pool.export(slot), state)


def test_taken_back_is_never_happened(model: Model, pool: StatePool, prompt: list[int]) -> None:
    want, state = once(model, pool, prompt)
    rng = random.Random(1)
    slot, rows = pool.alloc(), []
    while pool.length(slot) < LENGTH:
        start = pool.length(slot)
        good = prompt[start : start + rng.choice([1, 2, 3, 11])]
        wrong = [rng.randrange(256) for _ in range(rng.randrange(pool.max_rollback + 1))]
        rows.append(feed(model, pool, slot, good + wrong)[: len(good)])
        pool.truncate(slot, start + len(good))
    assert torch.equal(torch.cat(rows), want)
    assert_same_state(pool.export(slot), state)


@pytest.mark.parametrize("cut", [1, 14, 16, 41, 82])
def test_a_moved_request_goes_on_the_same(model: Model, pool: StatePool, prompt: list[int], cut: int) -> None:
    want, state = once(model, pool, prompt)
    slot = pool.alloc()
    feed(model, pool, slot, prompt[:cut])
    elsewhere = StatePool(model.config, num_slots=2, max_tokens=100, max_rollback=3)
    target = elsewhere.alloc()
    elsewhere.import_(target, pool.export(slot))
    assert torch.equal(feed(model, elsewhere, target, prompt[cut:]), want[cut:])
    assert_same_state(elsewhere.export(target), state)


def test_looking_changes_nothing(model: Model, pool: StatePool, prompt: list[int]) -> None:
    want, _ = once(model, pool, prompt)
    trace: dict[str, torch.Tensor] = {}
    slot = pool.alloc()
    hidden = model.forward(Batch.all_rows([(slot, 0, prompt)]), pool, trace)
    assert trace and torch.equal(model.logits(hidden), want)


def test_only_wanted_rows_come_back(model: Model, pool: StatePool, prompt: list[int]) -> None:
    want, _ = once(model, pool, prompt)
    first, second = pool.alloc(), pool.alloc()
    batch = Batch.last_rows([(first, 0, prompt[:30]), (second, 0, prompt)])
    assert torch.equal(model.logits(model.forward(batch, pool)), want[[29, LENGTH - 1]])
