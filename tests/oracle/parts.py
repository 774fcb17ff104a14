"""What a golden folder says about parts alone: draft stages, bounded replay, router and experts, mixes, Engram."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from kernels.batch import Batch, Segment
from kernels.block import Block
from kernels.cache import StatePool
from kernels.draft import Drafter
from kernels.engine import Sampling
from kernels.experts import LocalExperts
from kernels.layout import Layout
from kernels.model import Model, load_model
from kernels.ops.engram import table_rows
from kernels.ops.experts import Routes, activate, route, run_experts
from kernels.ops.mix import Mix, collapse, expand
from tests.kernels.conftest import unpacked
from tests.oracle.backbone import Dtype, Tensors, part, prompts_of
from tests.oracle.report import Report
from tests.oracle.sums import either_sums

GREEDY = Sampling(0.0, 1.0, 0)


def check_parts(report: Report, folder: Path, dtype: Dtype) -> None:
    """The files of `folder` that need no run of the whole model, and bounded replay."""
    model = load_model(folder, compute_dtype=dtype)
    path = folder / f"dspark_{dtype}.safetensors"
    if path.exists() and model.drafter is not None:
        check_drafts(report, model, load_file(path), f"{folder.name} {dtype} drafts", dtype)
    if dtype == "fp32" and (folder / "replay_derived_fp32.safetensors").exists():
        _replays(report, model, load_file(folder / "replay_derived_fp32.safetensors"), folder.name)
    if dtype == "bf16" and (folder / "moe_mhc.safetensors").exists():
        _layers(report, model, load_file(folder / "moe_mhc.safetensors"), folder.name)
    if dtype == "bf16" and (folder / "engram.safetensors").exists():
        _engram(report, model, load_file(folder / "engram.safetensors"), folder.name)


def check_drafts(report: Report, model: Model, data: Tensors, name: str, dtype: Dtype) -> None:
    """The taps are given, so that no difference of the backbone comes in."""
    drafter, window = model.drafter, model.config.sliding_window
    assert drafter is not None
    for prompt in prompts_of(data):
        golden = part(data, prompt)
        pool = StatePool(model.config, 1, model.config.max_position_embeddings, drafts=True)
        slot = pool.alloc()
        _observe(drafter, pool, slot, golden["main_hidden_prefill"])
        wrong, logits, confidence = 0, 0.0, 0.0
        for number, hidden in enumerate(golden["main_hidden_steps"]):
            _observe(drafter, pool, slot, hidden[None])
            following, *proposed = golden["output_ids"][number].tolist()
            got = drafter.draft([(slot, following)], [GREEDY], pool)
            wrong += got.tokens[0].tolist() != proposed
            logits = max(logits, float((got.logits[0] - golden["draft_logits"][number].float()).abs().max()))
            confidence = max(confidence, float((got.confidence[0] - golden["confidence"][number].float()).abs().max()))
        limit = 2e-5 if dtype == "fp32" else 0.05
        detail = f"{wrong} of {number + 1} blocks differ, logits {logits:.1e}, confidence {confidence:.1e}"
        report.add(f"{name} {prompt}", wrong == 0 and max(logits, confidence) <= limit, detail)
        length = pool.length(slot)
        last = torch.arange(max(0, length - window), length)
        for stage, ring in enumerate(unpacked(pool.export(slot))["draft_swa"]):
            report.caches(f"{name} {prompt} ring {stage}", ring, golden[f"ring_after_steps.{stage}"][last % window])


def _observe(drafter: Drafter, pool: StatePool, slot: int, hidden: torch.Tensor) -> None:
    layout = Layout([Segment(slot, pool.length(slot), len(hidden))], pool)
    padded = torch.nn.functional.pad(hidden.float(), (0, 0, 0, layout.padded - layout.num_rows))
    assert pool.taps is not None
    streams = padded.unsqueeze(1).chunk(len(drafter.config.dspark_target_layer_ids), 2)
    pool.taps.keep(streams, layout.taps, drafter.observe)
    pool.advance(slot, len(hidden))


def _replays(report: Report, model: Model, data: Tensors, folder: str) -> None:
    for case in sorted({name.split(".")[0] for name in data}):
        golden = part(data, case)
        error, wrong, words = either_sums(partial(_replay, model, golden))
        report.add(f"{folder} fp32 replay {case}", error <= 2e-3 and wrong == 0, words)


def _replay(model: Model, golden: Tensors) -> tuple[float, int]:
    """The greatest error of a replayed prompt's logits, and how many tokens after it differ."""
    tokens, hit = golden["prompt"].tolist(), int(golden["H"])
    pool = StatePool(model.config, 2, model.config.max_position_embeddings)
    slot = pool.alloc()
    if hit > 0:
        full = pool.alloc()
        model.forward(Batch.last_rows([(full, 0, tokens)]), pool)
        state = pool.export(full)
        cached = {"tokens": state["tokens"][:hit]}
        for role in model.config.kv_owners:
            for name in (f"main.{role.layer}", f"index_k.{role.layer}"):
                cached[name] = state[name][: hit // role.ratio]
        pool.import_prefix(slot, cached)
    pool.plan_replay(slot, len(tokens))
    start = pool.length(slot)
    batch = Batch.all_rows([(slot, start, tokens[start:])])
    logits = model.logits(model.forward(batch, pool))[-len(golden["replay_logits"]) :]
    row, wrong = logits[-1], 0
    for token in golden["greedy_tokens"].tolist():
        wrong += int(row.argmax()) != token
        row = model.logits(model.forward(Batch.last_rows([(slot, pool.length(slot), [token])]), pool))[0]
    return float((logits - golden["replay_logits"]).abs().max()), wrong


def _layers(report: Report, model: Model, data: Tensors, folder: str) -> None:
    blocks = {block.role.name: block for block in model.blocks}
    if model.drafter is not None:
        blocks |= {stage.role.name: stage for stage in model.drafter.stages}
    for name in sorted({".".join(key.split(".")[:2]) for key in data}):
        golden, block = part(data, name), blocks[name]
        _experts(report, model, block, golden, f"{folder} {name}")
        _mixes(report, model, block, golden, f"{folder} {name}")


def _experts(report: Report, model: Model, block: Block, golden: Tensors, name: str) -> None:
    moe, limit, round_ = block.moe, model.config.swiglu_limit, model.round
    x = golden["x"].float()
    shared, logits = moe.w_in.forward(x)
    routes = route(logits, moe.bias, moe.role.num_picks, model.config.routed_scaling_factor)
    got, want = routes.experts.sort(-1), golden["gate_indices"].long().sort(-1)
    report.equal(f"{name} gate", got.values, want.values)
    weights = golden["gate_weights"].gather(1, want.indices)
    report.close(f"{name} gate weights", routes.weights.gather(1, got.indices), weights, 2e-6)
    shared_out = round_(moe.shared_w2.forward(round_(activate(round_(shared), limit)))[0])
    report.rms(f"{name} shared expert", shared_out, golden["shared_out"], 0.01, 2)
    experts = moe.experts
    assert isinstance(experts, LocalExperts)
    up, down = experts.up, experts.down
    assert isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor)  # on a CPU
    weight = round_(torch.tensor(0.7))  # as the golden run had it
    only = Routes(torch.zeros(len(x), 1, dtype=torch.int64), weight.expand(len(x), 1))
    first = run_experts(experts.quantize(x), only, up, down, limit, round_, experts.quantize)
    report.rms(f"{name} expert 0", first, golden["expert0_out_w0.7"], 0.01, 2)
    routed = run_experts(experts.quantize(x), routes, up, down, limit, round_, experts.quantize)
    report.rms(f"{name} all experts", round_(shared_out + routed), golden["moe_out"], 0.01, 2)


def _mixes(report: Report, model: Model, block: Block, golden: Tensors, name: str) -> None:
    x, y = golden["hc_x"].float(), golden["hc_y"].float()
    mixes: dict[str, Mix] = {}
    for which, weights in (("attn", block.attn_mix), ("ffn", block.ffn_mix)):
        mixes[which] = block._mix(x, weights)
        for coefficient in ("pre", "post", "comb"):
            got, want = getattr(mixes[which], coefficient), golden[f"hc_{which}.{coefficient}"]
            report.close(f"{name} {which} {coefficient}", got.reshape(want.shape), want, 5e-6)
    collapsed = collapse(x, mixes["attn"].pre, model.round)
    report.rms(f"{name} collapse", collapsed, golden["hc_collapsed_with_attn_pre"], 0.004)
    report.rms(f"{name} expand", expand(y, x, mixes["ffn"], model.round), golden["hc_expanded_ffn"], 0.004)


def _engram(report: Report, model: Model, data: Tensors, folder: str) -> None:
    assert model.token_map is not None
    report.equal(f"{folder} token map", model.token_map.ids, data["token_map"])
    ids, num = model.token_map.ids[data["tokens"]], model.config.engram_max_ngram_size
    for suffix, alive in (("", torch.ones_like(ids)), ("_masked", data["text_mask"].long())):
        seen = torch.where(alive.bool(), ids, -1)
        shifted = [torch.cat((torch.full((shift,), -1), seen[: len(seen) - shift])) for shift in range(num)]
        history = torch.stack(shifted, 1)
        for order, engram in enumerate(model.engrams.values()):
            got = table_rows(history, model.token_map.pad, engram.tables)
            report.equal(f"{folder} engram {order} rows{suffix}", got, data[f"rows{suffix}"][:, order])
        if suffix:
            for layer, engram in model.engrams.items():
                x = data["x_in"].float()
                out = engram.forward(x, history[: len(x)], model.token_map.pad)
                report.rms(f"{folder} engram layers.{layer} out", out, data[f"layers.{layer}.out_masked"], 0.01)
