"""The whole model as a GPU would compute it: on a pretended device, through interpreted kernels.

Prompts and models are as short as they can be: an interpreted row takes seconds, Sinkhorn's iterations are most of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.engine import Sampling
from kernels.experts import LocalExperts
from kernels.model import Model, load_model
from kernels.ops.experts import Fp4Weights
from kernels.ops.linear import Fp8Weight
from tests.kernels.conftest import GOLDEN
from tests.kernels.gpu.device import CUDA, PretendCuda, is_marked
from tests.untrained import untrained

KEPT = ["layers.2.", "layers.4.", "layers.6."]  # pairs, full, reindex
CHANGED = {
    "num_hidden_layers": 3, "compress_ratios": [2, 1, 1], "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2], "candidate_source_layer_id": 1, "engram_layer_ids": [],
    "engram_num_embeddings": [], "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [0, 1, 2],
    "hc_sinkhorn_iters": 1, "sliding_window": 2, "index_topk": 2, "dspark_block_size": 3,
    "candidate_topk_blocks": 2, "candidate_block_size": 1, "index_n_heads": 2,
}  # fmt: skip
TWO_LAYERS = {
    "num_hidden_layers": 2, "compress_ratios": [0, 2], "kv_source_layer_ids": [1], "index_source_layer_ids": [1],
    "engram_layer_ids": [0], "engram_num_embeddings": [660], "num_nextn_predict_layers": 0,
    "hc_sinkhorn_iters": 2,
}  # fmt: skip


def test_plain_weights_and_engram(tmp_path: Path) -> None:
    """Two layers of mini: a window with Engram, and pairs."""
    config = json.loads((GOLDEN / "mini" / "config.json").read_text())
    config["text_config"].update(TWO_LAYERS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "engram_token_map.json").write_bytes((GOLDEN / "mini" / "engram_token_map.json").read_bytes())
    kept = {"layers.1.": "layers.0.", "layers.2.": "layers.1."}
    tensors = {}
    for name, tensor in load_file(GOLDEN / "mini" / "model.safetensors").items():
        prefix = ".".join(name.split(".")[:2]) + "."
        if not name.startswith(("layers.", "mtp.")):
            tensors[name] = tensor
        elif prefix in kept:
            tensors[kept[prefix] + name.removeprefix(prefix)] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = [5, 250, 7]

    def logits(model: Model, device: torch.device) -> torch.Tensor:
        pool = StatePool(model.config, 1, 128, device=device)
        hidden = model.forward(Batch.all_rows([(pool.alloc(), 0, tokens)]), pool)
        assert is_marked(hidden) == (device == CUDA)
        return model.logits(hidden).cpu()

    want = logits(load_model(tmp_path), torch.device("cpu"))
    with PretendCuda():
        got = logits(load_model(tmp_path, device="cuda"), CUDA)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A part of the untrained checkpoint, with FP8 and FP4 weights, where three tokens are a long prompt."""
    config = json.loads((untrained() / "config.json").read_text())
    config["text_config"].update(CHANGED)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(untrained() / "model.safetensors").items():
        if name.endswith(("indexer.wq_b.weight", "indexer.wq_b.scale", "indexer.weights_proj.weight")):
            tensor = tensor[: len(tensor) // 4].clone()  # two heads of eight
        for number, prefix in enumerate(KEPT):
            if name.startswith(prefix) and not name.startswith("layers.2.engram"):
                tensors[f"layers.{number}.{name.removeprefix(prefix)}"] = tensor
        part = name.removeprefix("mtp.2.")
        if name.startswith("mtp.0.") or part.startswith(("norm.", "markov_head.", "confidence_head.")):
            tensors[f"mtp.0.{part}" if name.startswith("mtp.2.") else name] = tensor
        if not name.startswith(("layers.", "mtp.")):
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.timeout(180)
def test_a_quantised_model_replays_decodes_drafts_and_moves(short: Path) -> None:
    want = run(load_model(short), torch.device("cpu"))
    with PretendCuda():
        model = load_model(short, device="cuda")
        experts = model.blocks[0].moe.experts
        assert isinstance(experts, LocalExperts) and isinstance(experts.up, Fp4Weights)
        assert isinstance(model.blocks[0].attention.wo_b.quantized, Fp8Weight)
        got = run(model, CUDA)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=2e-3, msg=lambda m, name=name: f"{name}: {m}")


def run(model: Model, device: torch.device) -> dict[str, torch.Tensor]:
    """Logits of a replayed prompt beside an exact one, of a step after moving and behind windows, and of a draft."""
    assert model.drafter is not None
    outcome = {}
    pool = StatePool(model.config, 4, 128, 5, drafts=True, device=device)
    slot, other = pool.alloc(), pool.alloc()
    pool.plan_replay(slot, 3)
    assert model.config.image_token_id is not None
    batch = Batch.last_rows([(slot, 0, range(40, 43)), (other, 0, [model.config.image_token_id])])
    outcome["prompt"] = model.logits(model.forward(batch, pool)).cpu()
    moved, state = pool.alloc(), pool.export(slot)
    assert not any(is_marked(array) for array in state.values())
    pool.import_(moved, state)
    resumed, windows = pool.alloc(), pool.windows(slot, 2)
    assert windows is not None
    outcome["windows"], outcome["payloads"] = windows, pool.kv.payloads(slot, 0, 1)
    assert not any(is_marked(outcome[name]) for name in ("windows", "payloads"))
    pool.import_prefix(resumed, {"tokens": state["tokens"][:2], "swa": windows, **pool.kv.records(slot, 2)})
    batch = Batch.last_rows([(moved, 3, [50]), (other, 1, [51]), (resumed, 2, [42])])
    outcome["decode"] = model.logits(model.forward(batch, pool)).cpu()
    outcome["draft"] = model.drafter.draft([(moved, 52)], [Sampling(0.0, 1.0, 0)], pool).logits.cpu()
    return outcome
