"""Drafting and verifying gives the tokens of plain decoding, whatever is proposed and however much is verified."""

import random
from functools import cache

import pytest
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.engine import Sampling
from kernels.model import Model
from kernels.verify import sample_rows, verify
from tests.kernels.test_invariance import assert_same_state, feed
from tests.kernels.test_replay import begin, prompt_of

NUM_NEW = 16
SAMPLINGS = [
    Sampling(0.0, 1.0, 0),
    Sampling(0.0, 1.0, 7),
    Sampling(1.0, 1.0, 11),
    Sampling(0.6, 0.9, 2**63 - 1),
    Sampling(1.5, 0.5, -5),
]
LENGTHS = [1, 8, 16, 45, 90]


@pytest.fixture
def drafting(mini: Model) -> StatePool:
    return StatePool(mini.config, num_slots=5, max_tokens=256, max_rollback=5, drafts=True)


@cache
def plain(model: Model, replay: bool) -> list[list[int]]:
    """The tokens of decoding one by one, each request alone."""
    pool, found = StatePool(model.config, 1, 256), []
    for length, sampling in zip(LENGTHS, SAMPLINGS, strict=True):
        slot = begin(model, pool, prompt_of(length, length)) if replay else pool.alloc()
        tokens: list[int] = []
        row = feed(model, pool, slot, prompt_of(length, length))[-1:]
        while len(tokens) < NUM_NEW:
            tokens += sample_rows(row, [sampling], torch.tensor([pool.length(slot)])).tolist()
            row = feed(model, pool, slot, tokens[-1:])
        pool.free(slot)
        found.append(tokens)
    return found


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("proposals", ["drafter", "good", "mixed"])
def test_same_tokens_as_plain_decoding(mini: Model, drafting: StatePool, proposals: str, replay: bool) -> None:
    """Five requests of different lengths and samplings in one batch, each with 0 to 5 drafts a step."""
    assert mini.drafter is not None
    prompts = [prompt_of(length, length) for length in LENGTHS]
    each = list(zip(prompts, SAMPLINGS, strict=True))
    want = plain(mini, replay)
    rng = random.Random(proposals)
    slots, got = [], []
    for prompt, sampling in each:
        slots.append(begin(mini, drafting, prompt) if replay else drafting.alloc())
        row = feed(mini, drafting, slots[-1], prompt)[-1:]
        got.append(sample_rows(row, [sampling], torch.tensor([len(prompt)])).tolist())
    num_steps = num_accepted = 0
    while active := [number for number in range(len(slots)) if len(got[number]) < NUM_NEW]:
        rng.shuffle(active)
        samplings = [SAMPLINGS[number] for number in active]
        drafts = [
            drafted[: rng.randrange(6)]
            for drafted in mini.drafter.draft(
                [(slots[number], got[number][-1]) for number in active], samplings, drafting
            ).tokens.tolist()
        ]
        if proposals != "drafter":  # random weights foresee little, so foresee for them
            for place, number in enumerate(active):
                known = want[number][len(got[number]) :][: len(drafts[place])]
                good = rng.randrange(len(known) + 1) if proposals == "mixed" else len(known)
                drafts[place][:good] = known[:good]
        starts = [drafting.length(slots[number]) for number in active]
        runs = [
            (slots[number], start, [got[number][-1], *drafted])
            for number, start, drafted in zip(active, starts, drafts, strict=True)
        ]
        logits = mini.logits(mini.forward(Batch.all_rows(runs), drafting))
        for number, start, new in zip(active, starts, verify(logits, drafts, starts, samplings), strict=True):
            drafting.truncate(slots[number], start + len(new))
            got[number] += new
            num_accepted += len(new) - 1
        num_steps += 1
    assert [tokens[:NUM_NEW] for tokens in got] == want
    if proposals != "drafter":
        assert num_accepted > num_steps


@pytest.mark.parametrize("replay", [False, True])
def test_taken_back_is_never_happened(mini: Model, drafting: StatePool, replay: bool) -> None:
    """Of one token and k drafts, n stay: state, rows and next drafts are bitwise those of a request fed only these."""
    assert mini.drafter is not None
    rng = random.Random(2)
    prompt, more = prompt_of(37), prompt_of(80, 1)
    slot, other = (begin(mini, drafting, prompt) if replay else drafting.alloc() for _ in range(2))
    for each in (slot, other):
        feed(mini, drafting, each, prompt)
    fed = 0
    while fed < 70:
        # First the most that may be taken back, then any number.
        start, num_drafts = drafting.length(slot), rng.randrange(6) if fed else 5
        num_kept = rng.randrange(num_drafts + 1) + 1 if fed else 1
        kept = more[fed : fed + num_kept]
        wrong = [rng.randrange(256) for _ in range(1 + num_drafts - num_kept)]
        rows = feed(mini, drafting, slot, kept + wrong)[:num_kept]
        drafting.truncate(slot, start + num_kept)
        assert torch.equal(torch.cat([feed(mini, drafting, other, [token]) for token in kept]), rows)
        fed += num_kept
        assert_same_state(drafting.export(slot), drafting.export(other))
        proposed = [mini.drafter.draft([(each, 5)], [SAMPLINGS[2]], drafting) for each in (slot, other)]
        assert torch.equal(proposed[0].logits, proposed[1].logits)


def test_accepted_while_equal() -> None:
    greedy, seeded = Sampling(0.0, 1.0, 0), Sampling(1.0, 1.0, 3)
    logits = torch.full((8, 10), -50.0)
    for row, token in enumerate([4, 5, 6, 7, 1, 2, 3, 9]):
        logits[row, token] = 50.0
    drafts = [[4, 5, 0], [], [2, 3]]
    got = verify(torch.cat((logits[:4], logits[7:], logits[4:7])), drafts, [10, 0, 99], [greedy, seeded, seeded])
    assert got == [[4, 5, 6], [9], [1]]  # all three of the last are wrong behind the first
    assert verify(logits[:3], [[4, 5]], [0], [greedy]) == [[4, 5, 6]]  # all accepted, and one more
    with pytest.raises(ValueError, match="4 tokens to verify, 3 rows"):
        verify(logits[:3], [[4, 5, 6]], [0], [greedy])


def test_noise_is_that_of_the_position() -> None:
    """With flat logits the token is the noise's alone, so a shifted position would be another token."""
    seeded, flat = Sampling(1.0, 1.0, 42), torch.zeros(6, 256)
    line = sample_rows(flat, [seeded] * 6, torch.arange(21, 27)).tolist()
    assert len(set(line)) > 3
    assert verify(flat, [line[:5]], [20], [seeded]) == [line]
    assert verify(flat, [line[:5]], [21], [seeded])[0] != line
