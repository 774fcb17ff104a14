"""The text model of a golden folder: logits, layers, picks, caches, greedy runs."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from kernels.batch import Batch, Segment
from kernels.cache import StatePool
from kernels.layout import Layout
from kernels.model import Model, load_model
from kernels.ops.rope import Rotation
from kernels.step import Step
from tests.kernels.conftest import unpacked
from tests.oracle.report import Report
from tests.oracle.sums import either_sums

Dtype = Literal["fp32", "bf16"]
Tensors = dict[str, torch.Tensor]
SHORT = 32
"""BF16 runs are comparable end to end up to about so many tokens: a flipped pick then changes everything behind it."""


def prompts_of(data: Tensors) -> list[str]:
    return sorted({name.split(".")[0] for name in data if name.endswith((".tokens", ".prompt"))})


def part(data: Tensors, name: str) -> Tensors:
    return {key.removeprefix(f"{name}."): value for key, value in data.items() if key.startswith(f"{name}.")}


def rows(model: Model, pool: StatePool, tokens: list[int], trace: Tensors | None = None) -> tuple[int, torch.Tensor]:
    slot = pool.alloc()
    return slot, model.logits(model.forward(Batch.all_rows([(slot, 0, tokens)]), pool, trace))


def check_backbone(report: Report, folder: Path, dtype: Dtype) -> None:
    """Everything of `folder` that its files say about the text model in this mode."""
    model = load_model(folder, compute_dtype=dtype)
    pool = StatePool(model.config, 2, model.config.max_position_embeddings, drafts=True)
    _logits(report, model, pool, folder, dtype)
    for name, check in (("trace", _trace), ("index_cache", _index_cache), ("greedy", _greedy)):
        path = folder / f"{name}_{dtype}.safetensors"
        if path.exists():
            check(report, model, pool, load_file(path), f"{folder.name} {dtype} {name}", folder)
    if (folder / "config_dense.json").exists():
        _dense(report, folder, dtype)


def _dense(report: Report, folder: Path, dtype: Dtype) -> None:
    with tempfile.TemporaryDirectory() as name:
        for path in folder.iterdir():
            (Path(name) / path.name).symlink_to(path)
        (Path(name) / "config.json").unlink()
        (Path(name) / "config.json").symlink_to(folder / "config_dense.json")
        model = load_model(name, compute_dtype=dtype)
    pool = StatePool(model.config, 2, model.config.max_position_embeddings)
    golden, other = (load_file(folder / f"logits_{each}_dense.safetensors") for each in (dtype, "fp32"))
    for prompt in prompts_of(golden):
        data, name = part(golden, prompt), f"{folder.name} dense {dtype} {prompt}"
        if dtype == "fp32":
            _fp32_logits(report, name, model, pool, data)
            continue
        slot, got = rows(model, pool, data["tokens"].tolist())
        pool.free(slot)
        got = got[data["positions"].long()]
        _bf16_logits(report, name, got, data["logits"], other[f"{prompt}.logits"], is_required=True)


def _logits(report: Report, model: Model, pool: StatePool, folder: Path, dtype: Dtype) -> None:
    path = folder / f"logits_{dtype}.safetensors"
    if not path.exists():
        return
    golden, other = load_file(path), load_file(folder / "logits_fp32.safetensors")
    for prompt in prompts_of(golden):
        data = part(golden, prompt)
        name = f"{folder.name} {dtype} logits {prompt} ({len(data['tokens'])} tokens)"
        if dtype == "fp32":
            _fp32_logits(report, name, model, pool, data)
            continue
        slot, got = rows(model, pool, data["tokens"].tolist())
        pool.free(slot)
        got = got[data["positions"].long()]
        is_short = len(data["tokens"]) <= SHORT and "quant" not in folder.name
        _bf16_logits(report, name, got, data["logits"], other[f"{prompt}.logits"], is_required=is_short)


def _fp32_logits(report: Report, name: str, model: Model, pool: StatePool, data: Tensors) -> None:
    """At positions whose golden logits do not depend on the order of summation."""
    quiet = data["noise"] < 1e-3 if "noise" in data else slice(None)

    def run() -> tuple[float, int]:
        slot, got = rows(model, pool, data["tokens"].tolist())
        pool.free(slot)
        return float((got[data["positions"].long()] - data["logits"])[quiet].abs().max()), 0

    error, _, words = either_sums(run)
    report.add(name, error <= 2e-3, words)


def _bf16_logits(
    report: Report, name: str, got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, *, is_required: bool
) -> None:
    cosine = float(torch.nn.functional.cosine_similarity(got, want, dim=-1).min())
    error, most = float((got - want).abs().max()), 3 * float((want - exact).abs().max())
    passed = cosine >= 0.995 and error <= most
    detail = f"cosine {cosine:.4f}, max error {error:.2f}, allowed {most:.2f}"
    report.add(name, passed, detail, is_required=is_required)


def _trace(report: Report, model: Model, pool: StatePool, want: Tensors, name: str, folder: Path) -> None:
    """Layer by layer, each fed with golden inputs."""
    tokens = want["tokens"]
    slot = pool.alloc()
    layout = Layout([Segment(slot, 0, len(tokens))], pool)
    pool.tokens[slot, : len(tokens)] = tokens
    trace: Tensors = {}
    window, compressed = (
        Rotation.at(layout.positions, freqs) for freqs in (model.window_freqs, model.compressed_freqs)
    )
    history = model._history(layout, pool) if model.engrams else None
    step = Step(layout, pool, window, compressed, trace, history)
    is_bf16 = want["layers.0.out"].dtype == torch.bfloat16

    def padded(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(value.float(), (0, 0) * (value.dim() - 1) + (0, layout.padded - len(tokens)))

    def compare(what: str, got: torch.Tensor, golden: torch.Tensor) -> None:
        if is_bf16:
            report.rms(f"{name} {what}", got[: len(tokens)], golden, 0.01, num_loose_rows=2)
        else:
            report.close(f"{name} {what}", got[: len(tokens)], golden, 2e-5, rtol=1e-5)

    streams, pre = padded(want["embed_expanded_in"]), torch.zeros(layout.padded, model.config.hc_mult)
    pre[:, 0] = 1.0
    for block in model.blocks:
        layer = f"layers.{block.role.layer}"
        if block.role.layer in model.engrams and model.token_map is not None and step.history is not None:
            added = model.engrams[block.role.layer].forward(streams, step.history, model.token_map.pad)
            if f"{layer}.in_after_engram" in want:  # otherwise the golden input holds it already
                compare(f"{layer} engram", added, want[f"{layer}.in_after_engram"])
                streams = padded(want[f"{layer}.in_after_engram"])
        out, pre_out = block.forward(streams, block.project(streams, pre, step), step)
        compare(f"{layer} out", out, want[f"{layer}.out"])
        compare(f"{layer} pre", pre_out, want[f"{layer}.pre_out"])
        got_picks, picks = (each[f"{layer}.gate_indices"].long().sort(-1).values for each in (trace, want))
        wrong = int((got_picks != picks).any(-1).sum())
        report.add(f"{name} {layer} experts", wrong <= (2 if is_bf16 else 0), f"{wrong} of {len(picks)} rows differ")
        index = f"index.{layer}"
        if f"{index}.topk" in want:
            scores = want[f"{index}.scores"]
            finite = scores[scores.isfinite()].float().abs()
            tolerance = 2**-7 * float(finite.max()) if is_bf16 else 1e-5
            report.picks(f"{name} {layer} picks", trace[f"{index}.topk"], want[f"{index}.topk"], scores, tolerance)
        streams, pre = padded(want[f"{layer}.out"]), padded(want[f"{layer}.pre_out"])
    pool.advance(slot, len(tokens))
    state = unpacked(pool.export(slot))
    for role in model.config.kv_owners:
        golden = f"cache.layers.{role.layer}"
        report.caches(f"{name} {golden} main", state[f"main.{role.layer}"], want[f"{golden}.main_kv"])
        report.caches(f"{name} {golden} index", state[f"index_k.{role.layer}"], want[f"{golden}.index_k"])
    pool.free(slot)


def _index_cache(report: Report, model: Model, pool: StatePool, want: Tensors, name: str, folder: Path) -> None:
    if name.split()[1] == "bf16":
        return  # a hundred tokens end to end: not comparable, says the golden data
    tokens, trace = want["tokens"].tolist(), Tensors()
    slot, _ = rows(model, pool, tokens, trace)
    for role in model.config.layers:
        index = f"index.layers.{role.layer}"
        if f"{index}.topk" in want:
            scores = want[f"{index}.scores"]
            report.picks(f"{name} {index}", trace[f"{index}.topk"], want[f"{index}.topk"], scores, 1e-5)
        if f"{index}.candidate_mask" in want:
            mask = want[f"{index}.candidate_mask"]
            report.equal(f"{name} {index} candidates", trace[f"{index}.candidate_mask"][:, : mask.shape[1]], mask)
    state, window = unpacked(pool.export(slot)), model.config.sliding_window
    last = torch.arange(max(0, len(tokens) - window + 1), len(tokens))
    for role in model.config.layers:
        cache = f"cache.layers.{role.layer}"
        report.caches(f"{name} {cache} window", state["swa"][role.layer], want[f"{cache}.swa_ring"][last % window])
        if role.owns_kv:
            report.caches(f"{name} {cache} main", state[f"main.{role.layer}"], want[f"{cache}.main_kv"])
            report.caches(f"{name} {cache} index", state[f"index_k.{role.layer}"], want[f"{cache}.index_k"])
    for number, token in enumerate(want["decode_intended.fed_tokens"].tolist()):
        trace = {}
        model.forward(Batch.last_rows([(slot, len(tokens) + number, [token])]), pool, trace)
        for role in model.config.layers:
            golden = part(want, f"decode_intended.step{number}.layers.{role.layer}")
            if golden:
                got = trace[f"index.layers.{role.layer}.topk"]
                step = f"{name} step {number} layer {role.layer}"
                report.picks(step, got, golden["topk"][None], golden["scores"][None], 1e-5)
    pool.free(slot)


def _greedy(report: Report, model: Model, pool: StatePool, data: Tensors, name: str, folder: Path) -> None:
    """Fed with the golden tokens, up to the first step whose golden logits are not reproducible."""
    dtype = name.split()[1]
    noise = json.loads((folder / "stats.json").read_text())["greedy"]
    for prompt in prompts_of(data):
        run = part(data, prompt)
        recorded = noise[f"{dtype}.{prompt}.intended"]["reorder_noise_per_step"]
        num_steps = next((step for step, value in enumerate(recorded) if value > 1e-3), len(recorded))
        error, wrong, words = either_sums(partial(_greedy_run, model, pool, run, num_steps))
        limit = 2e-3 if dtype == "fp32" else 0.2
        passed = wrong == 0 and error <= limit
        report.add(f"{name} {prompt}, {num_steps} steps", passed, words, is_required=dtype == "fp32")


def _greedy_run(model: Model, pool: StatePool, run: Tensors, num_steps: int) -> tuple[float, int]:
    """The largest error of the logits, and how many tokens are not the golden ones."""
    slot, logits = rows(model, pool, run["prompt"].tolist())
    row, wrong, error = logits[-1], 0, 0.0
    for token, want in list(zip(run["intended.tokens"].tolist(), run["intended.logits"], strict=True))[:num_steps]:
        error = max(error, float((row - want).abs().max()))
        wrong += int(row.argmax()) != token
        row = model.logits(model.forward(Batch.last_rows([(slot, pool.length(slot), [token])]), pool))[0]
    pool.free(slot)
    return error, wrong
