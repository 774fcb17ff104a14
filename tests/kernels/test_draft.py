"""The draft stages: against golden numbers, and that what they propose depends on their own request only."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.batch import Segment
from kernels.cache import StatePool
from kernels.checkpoint import Checkpoint, CheckpointError
from kernels.config import ConfigError, ModelConfig
from kernels.draft import Drafter
from kernels.engine import Sampling
from kernels.layout import Layout
from kernels.model import Model, load_model
from kernels.ops.rounding import keep
from kernels.verify import sample_rows
from tests.kernels.conftest import GOLDEN, golden, unpacked
from tests.kernels.test_invariance import assert_same_state, feed
from tests.kernels.test_oracle import assert_same_cache
from tests.kernels.test_replay import begin, prompt_of

GREEDY = Sampling(0.0, 1.0, 0)
WINDOW = 16


@pytest.fixture
def drafting(mini: Model) -> StatePool:
    return StatePool(mini.config, num_slots=6, max_tokens=256, drafts=True)


def observe(drafter: Drafter, pool: StatePool, slot: int, hidden: torch.Tensor) -> None:
    """Golden taps [tokens, targets * dim] of the next tokens, as if the backbone had computed them."""
    layout = Layout([Segment(slot, pool.length(slot), len(hidden))], pool)
    padded = torch.nn.functional.pad(hidden.float(), (0, 0, 0, layout.padded - layout.num_rows))
    assert pool.taps is not None
    streams = padded.unsqueeze(1).chunk(len(drafter.config.dspark_target_layer_ids), 2)
    pool.taps.keep(streams, layout.taps, drafter.observe)
    pool.advance(slot, len(hidden))


def assert_rings(pool: StatePool, slot: int, data: dict[str, torch.Tensor], name: str) -> None:
    length = pool.length(slot)
    positions = torch.arange(max(0, length - WINDOW), length)
    for stage, got in enumerate(unpacked(pool.export(slot))["draft_swa"]):
        assert_same_cache(got, data[name.format(stage)][positions % WINDOW])


@pytest.mark.oracle
@pytest.mark.parametrize("prompt", ["p02", "p05"])
@pytest.mark.usefixtures("sums")
def test_golden_drafts(mini: Model, drafting: StatePool, prompt: str) -> None:
    """The whole way: prompt, decoding, taps, windows, drafts. p05 wraps around the ring."""
    assert mini.drafter is not None
    data = {name.removeprefix(f"{prompt}."): value for name, value in golden("mini/dspark_fp32").items()}
    slot = drafting.alloc()
    feed(mini, drafting, slot, data["prompt"].tolist())
    assert_rings(drafting, slot, data, "ring_after_prefill.{}")
    for number, token in enumerate(data["fed_tokens"].tolist()):
        feed(mini, drafting, slot, [token])
        trace: dict[str, torch.Tensor] = {}
        following, *proposed = data["output_ids"][number].tolist()
        got = mini.drafter.draft([(slot, following)], [GREEDY], drafting, trace)
        assert got.tokens[0].tolist() == proposed
        torch.testing.assert_close(got.logits[0], data["draft_logits"][number], rtol=0, atol=2e-5)
        torch.testing.assert_close(got.confidence[0], data["confidence"][number], rtol=0, atol=2e-5)
        if number == 0:
            for stage in range(3):
                for ours, name in (("out", "hidden"), ("pre_out", "pre")):
                    want = data[f"step0.stage{stage}.{name}"]
                    torch.testing.assert_close(trace[f"mtp.{stage}.{ours}"], want, rtol=0, atol=2e-5)
    assert_rings(drafting, slot, data, "ring_after_steps.{}")


@pytest.mark.oracle
@pytest.mark.parametrize(("folder", "dtype"), [("mini", "bf16"), ("mini-quant", "fp32")])
@pytest.mark.usefixtures("sums")
def test_golden_drafts_from_golden_taps(mini_bf16: Model, folder: str, dtype: str) -> None:
    """BF16 rounding, and FP8 and FP4 weights; the taps are given, so that no difference of the backbone comes in."""
    path = GOLDEN / folder
    config = ModelConfig.from_folder(path)
    drafter = mini_bf16.drafter
    if dtype == "fp32":
        checkpoint = Checkpoint(path)
        embed, head = (checkpoint.tensor(f"{name}.weight", 256, 96) for name in ("embed", "head"))
        drafter = Drafter(config, checkpoint, embed, head, keep, None)
    assert drafter is not None
    raw = load_file(path / f"dspark_{dtype}.safetensors")
    data = {name.removeprefix("p05."): value for name, value in raw.items()}
    pool = StatePool(config, 1, 256, drafts=True)
    slot = pool.alloc()
    observe(drafter, pool, slot, data["main_hidden_prefill"])
    assert_rings(pool, slot, data, "ring_after_prefill.{}")
    for number, hidden in enumerate(data["main_hidden_steps"]):
        observe(drafter, pool, slot, hidden[None])
        following, *proposed = data["output_ids"][number].tolist()
        got = drafter.draft([(slot, following)], [GREEDY], pool)
        assert got.tokens[0].tolist() == proposed
        atol = 2e-5 if dtype == "fp32" else 0.1
        torch.testing.assert_close(got.logits[0], data["draft_logits"][number].float(), rtol=0, atol=atol)
        torch.testing.assert_close(got.confidence[0], data["confidence"][number].float(), rtol=0, atol=atol)
    assert_rings(pool, slot, data, "ring_after_steps.{}")


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["hit64_p08", "hit33_p10"])
@pytest.mark.usefixtures("sums")
def test_replay_seeds_the_windows(mini: Model, drafting: StatePool, case: str) -> None:
    data = golden("mini/replay_derived_fp32")
    tokens = data[f"{case}.prompt"].tolist()
    slot = begin(mini, drafting, tokens, int(data[f"{case}.H"]))
    feed(mini, drafting, slot, tokens[drafting.length(slot) :])
    assert_rings(drafting, slot, data, case + ".cache.mtp.{}.swa_ring")


def test_a_batch_of_drafts_is_each_alone(mini: Model, drafting: StatePool) -> None:
    assert mini.drafter is not None
    rng = random.Random(3)
    runs, samplings = [], []
    for number, length in enumerate((1, 5, 40, 90, 17)):
        slot = drafting.alloc()
        feed(mini, drafting, slot, prompt_of(length, number))
        runs.append((slot, rng.randrange(256)))
        samplings.append(Sampling(rng.choice([0.0, 0.7, 1.3]), rng.choice([0.8, 1.0]), rng.randrange(2**40)))
    together = mini.drafter.draft(runs, samplings, drafting)
    for number, (run, sampling) in enumerate(zip(runs, samplings, strict=True)):
        alone = mini.drafter.draft([run], [sampling], drafting)
        for got, want in zip(together, alone, strict=True):
            assert torch.equal(got[number], want[0])


def test_drafts_draw_with_the_noise_of_their_positions(mini: Model, drafting: StatePool) -> None:
    assert mini.drafter is not None
    slot, sampling = drafting.alloc(), Sampling(3.0, 1.0, 77)
    feed(mini, drafting, slot, prompt_of(30))
    got = mini.drafter.draft([(slot, 9)], [sampling], drafting)  # 9 stands at position 30
    assert torch.equal(got.tokens[0], sample_rows(got.logits[0], [sampling] * 5, torch.arange(31, 36)))
    assert not torch.equal(got.tokens[0], sample_rows(got.logits[0], [sampling] * 5, torch.arange(30, 35)))


def test_taps_and_engram_on_both_sides_of_the_decoder(tmp_path: Path) -> None:
    """The published layers are all on one side; others must not depend on where replay narrows the pass."""
    top = json.loads((GOLDEN / "mini" / "config.json").read_text())
    top["text_config"].update(engram_layer_ids=[1, 8], dspark_target_layer_ids=[3, 6, 9])
    (tmp_path / "config.json").write_text(json.dumps(top))
    shutil.copy(GOLDEN / "mini" / "engram_token_map.json", tmp_path)
    tensors = load_file(GOLDEN / "mini" / "model.safetensors")
    moved = {name.replace("layers.4.engram", "layers.8.engram"): value for name, value in tensors.items()}
    save_file(moved, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    pool = StatePool(model.config, 2, 64, drafts=True)
    tokens, outcomes = prompt_of(40), []
    for cuts in ([40], [39, 1], [24, 16], [10, 15, 15]):  # the last row alone is computed without narrowing
        slot = begin(model, pool, tokens)
        for cut in cuts:
            start = pool.length(slot)
            row = feed(model, pool, slot, tokens[start : start + cut])[-1]
        outcomes.append({"row": row, **pool.export(slot)})
        pool.free(slot)
    for outcome in outcomes[1:]:
        assert_same_state(outcome, outcomes[0])


@pytest.mark.parametrize("replay", [False, True])
def test_windows_do_not_depend_on_cuts(mini: Model, drafting: StatePool, replay: bool) -> None:
    tokens, rng = prompt_of(75), random.Random(8)
    states = []
    for cuts in ([75], [1] * 75, [59, 16], [60, 1, 14], [rng.choice([3, 7, 20]) for _ in range(30)]):
        slot = begin(mini, drafting, tokens) if replay else drafting.alloc()
        for cut in cuts:
            start = drafting.length(slot)
            if start < len(tokens):
                feed(mini, drafting, slot, tokens[start : start + cut])
        states.append(drafting.export(slot))
        drafting.free(slot)
    assert states[0]["draft_swa"].shape == (3, WINDOW, 66)
    for state in states[1:]:
        assert_same_state(state, states[0])


@pytest.mark.parametrize("length", [1, 9, 16, 50])
def test_a_moved_request_drafts_the_same(mini: Model, drafting: StatePool, length: int) -> None:
    assert mini.drafter is not None
    slot = drafting.alloc()
    feed(mini, drafting, slot, prompt_of(length))
    elsewhere = StatePool(mini.config, 2, 100, max_rollback=3, drafts=True)
    target = elsewhere.alloc()
    elsewhere.import_(target, drafting.export(slot))
    want = mini.drafter.draft([(slot, 9)], [GREEDY], drafting)
    assert torch.equal(mini.drafter.draft([(target, 9)], [GREEDY], elsewhere).logits, want.logits)


def test_drafts_are_for_pools_that_keep_windows(mini: Model, pool: StatePool, drafting: StatePool) -> None:
    assert mini.drafter is not None
    slot = pool.alloc()
    feed(mini, pool, slot, [1, 2, 3])
    with pytest.raises(ValueError, match="keeps no draft windows"):
        mini.drafter.draft([(slot, 4)], [GREEDY], pool)
    target = drafting.alloc()
    with pytest.raises(ValueError, match="lacks draft_swa"):
        drafting.import_(target, pool.export(slot))
    with pytest.raises(ValueError, match="at least one computed token"):
        mini.drafter.draft([(target, 4)], [GREEDY], drafting)


def test_checkpoints_without_drafts(tmp_path: Path) -> None:
    for name in ("config.json", "engram_token_map.json"):
        shutil.copy(GOLDEN / "mini" / name, tmp_path / name)
    tensors = load_file(GOLDEN / "mini" / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if "mtp." not in name}, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert model.drafter is None
    pool = StatePool(model.config, 1, 32, drafts=True)
    feed(model, pool, pool.alloc(), [1, 2, 3])  # the pool's draft windows stay empty
    del tensors["mtp.1.attn.wkv.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtp\.1\.attn\.wkv\.weight is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dspark_block_size": 0}, "dspark_block_size"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank"),
        ({"dspark_noise_token_id": 256}, "dspark_noise_token_id"),
        ({"dspark_target_layer_ids": [7, 10]}, "dspark_target_layer_ids"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok"),
    ],
)
def test_a_wrong_key_is_named(change: dict[str, Any], named: str) -> None:
    top = json.loads((GOLDEN / "mini" / "config.json").read_text())
    ModelConfig.from_keys(top)
    top["text_config"].update(change)
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_keys(top)


def test_the_ring_is_read(mini: Model, drafting: StatePool) -> None:
    assert mini.drafter is not None
    slot = drafting.alloc()
    feed(mini, drafting, slot, prompt_of(40))
    want = mini.drafter.draft([(slot, 9)], [GREEDY], drafting).logits
    for position, reads in ((40 - WINDOW - 1, False), (40 - WINDOW, True), (39, True)):
        for stage in range(3):
            row = drafting.draft_swa[stage, slot, position % drafting.ring_rows]
            before = row.clone()
            row.neg_()
            got = mini.drafter.draft([(slot, 9)], [GREEDY], drafting).logits
            assert torch.equal(got, want) is not reads
            row.copy_(before)


def test_drafting_changes_no_row(mini: Model, drafting: StatePool, pool: StatePool) -> None:
    tokens = prompt_of(20)
    rows = [feed(mini, where, where.alloc(), tokens) for where in (pool, drafting)]
    assert torch.equal(*rows)
    assert pool.draft_swa.numel() == 0
