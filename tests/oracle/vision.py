"""Images against golden numbers: from pixels to rows, and prompts with these rows in them."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

from actors.vision.images import prepare
from kernels.batch import Batch, Images, Segment
from kernels.cache import StatePool
from kernels.config import ModelConfig
from kernels.layout import Layout
from kernels.model import Model, load_model
from kernels.ops.engram import table_rows
from kernels.ops.experts import route
from kernels.vision import load_vision
from tests.oracle.backbone import SHORT, Dtype, Tensors, part, prompts_of
from tests.oracle.report import Report
from tests.oracle.sums import either_sums


def check_vision(report: Report, folder: Path, dtype: Dtype) -> None:
    """Everything that `vision.safetensors` of `folder` says about this mode."""
    golden = load_file(folder / "vision.safetensors")
    spans = _images(report, folder, golden, dtype)
    model = load_model(folder, compute_dtype=dtype)
    noise = json.loads((folder / "images.json").read_text())["stats"] if (folder / "images.json").exists() else {}
    for prompt in prompts_of(golden):
        name, data = f"{folder.name} {dtype} {prompt}", part(golden, prompt)
        starts, numbers = data["image_starts"].tolist(), data["image_ids"].tolist()
        given = {0: [(start, spans[number].numpy()) for start, number in zip(starts, numbers, strict=True)]}
        if noise.get(f"{prompt}.{dtype}.reorder_noise", 0) < 1e-3 or dtype == "bf16":
            _prompt(report, model, data, given, dtype, name)
        if dtype == "fp32":
            report.equal(f"{name} Engram rows", _engram_rows(model, data["tokens"].tolist()), data["engram_rows"])
    if dtype == "fp32":
        _gate(report, model, part(golden, "gate"), folder.name)


def _images(report: Report, folder: Path, golden: Tensors, dtype: Dtype) -> list[torch.Tensor]:
    """Checks each image; the golden rows of each span, so that what follows is checked by itself."""
    config, vision = ModelConfig.from_folder(folder).vision, load_vision(folder, compute_dtype=dtype)
    assert config is not None
    spans: list[torch.Tensor] = []
    while data := part(golden, f"img{len(spans)}"):
        name = f"{folder.name} {dtype} image {len(spans)}"
        file = io.BytesIO()
        Image.fromarray(data["rgb"].numpy()).save(file, "PNG")
        prepared = prepare(file.getvalue(), config)
        report.equal(f"{name} pixels", torch.from_numpy(prepared.pixels.copy()), data["resized_rgb"])
        pixels = data["resized_rgb"].numpy()
        report.close(f"{name} patches", vision.patches(pixels), data["pixel_values"], 0)
        if dtype == "bf16":
            rows, columns = (side // config.patch_size for side in pixels.shape[:2])
            got = vision.tower(data["pixel_values"].float(), rows, columns)
            report.rms(f"{name} tower", got, data["vit_out"], 0.01)
        rows_of_image, is_cell = vision.encode(pixels), data["types"] == 1
        want = data["embeddings_fp32"] if dtype == "fp32" else data["embeddings"].float()
        if dtype == "fp32":
            report.close(f"{name} rows", rows_of_image[is_cell], want, 1e-5)
        else:
            report.rms(f"{name} rows", rows_of_image[is_cell], want, 0.01)
        weights = {0: vision.start, 2: vision.newline, 3: vision.end}
        span = torch.stack([weights.get(kind, vision.start) for kind in data["types"].tolist()])
        span[is_cell] = want
        report.close(f"{name} delimiters", rows_of_image[~is_cell], span[~is_cell], 0)
        spans.append(span)
    return spans


def _prompt(report: Report, model: Model, data: Tensors, given: Images, dtype: Dtype, name: str) -> None:
    if dtype == "bf16":
        got, want = _same_rows(_prompt_logits(model, data, given, dtype)[0], data["logits_bf16"])
        likeness = float(torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0))
        least, is_required = (0.995, True) if len(data["tokens"]) <= SHORT else (0.8, False)
        report.add(f"{name} logits", likeness >= least, f"cosine {likeness:.5f}", is_required=is_required)
        return
    error, wrong, words = either_sums(partial(_prompt_run, model, data, given))
    report.add(f"{name} logits", error <= 2e-3, words)
    report.add(f"{name} greedy tokens", wrong == 0, f"{wrong} of {len(data['greedy_intended_tokens_fp32'])} differ")


def _prompt_run(model: Model, data: Tensors, given: Images) -> tuple[float, int]:
    """The largest error of the logits, of the prompt and of the golden tokens behind it, and how many of these are
    wrong."""
    logits, pool = _prompt_logits(model, data, given, "fp32")
    tokens, steps = data["tokens"].tolist(), data["greedy_intended_tokens_fp32"].tolist()
    rows = [logits[-1:]]
    for place, token in enumerate(steps[:-1]):
        run = [(0, len(tokens) + place, [token])]
        rows.append(model.logits(model.forward(Batch.last_rows(run), pool)))
    greedy, (got, want) = torch.cat(rows), _same_rows(logits, data["logits_fp32"])
    errors = [float((got - want).abs().max()), float((greedy - data["greedy_intended_logits_fp32"]).abs().max())]
    return max(errors), int((greedy.argmax(1) != torch.tensor(steps)).sum())


def _prompt_logits(model: Model, data: Tensors, given: Images, dtype: Dtype) -> tuple[torch.Tensor, StatePool]:
    """Those of all tokens, and the state behind them."""
    tokens = data["tokens"].tolist()
    pool = StatePool(model.config, 1, len(tokens) + len(data[f"greedy_intended_tokens_{dtype}"]))
    return model.logits(model.forward(Batch.all_rows([(pool.alloc(), 0, tokens)], given), pool)), pool


def _same_rows(logits: torch.Tensor, golden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of long prompts every other row is kept."""
    return logits if len(logits) == len(golden) else logits[::2], golden


def _engram_rows(model: Model, tokens: list[int]) -> torch.Tensor:
    pool = StatePool(model.config, 1, len(tokens))
    slot = pool.alloc()
    pool.tokens[slot, : len(tokens)] = torch.tensor(tokens)
    history = model._history(Layout([Segment(slot, 0, len(tokens))], pool), pool)[: len(tokens)]
    assert model.token_map is not None
    pad = model.token_map.pad
    return torch.stack([table_rows(history, pad, engram.tables) for engram in model.engrams.values()], 1)


def _gate(report: Report, model: Model, data: Tensors, name: str) -> None:
    moe, is_image = model.blocks[0].moe, data["is_image"].bool()[:, None]
    assert moe.image_bias is not None
    _, logits = moe.w_in.forward(data["x"].float())
    bias = torch.where(is_image, moe.image_bias, moe.bias)
    got = route(logits, bias, model.config.num_experts_per_tok, model.config.routed_scaling_factor)
    order, want = got.experts.sort(1), data["indices"].long().sort(1)
    report.equal(f"{name} gate picks", order.values, want.values)
    weights = data["weights"].gather(1, want.indices)
    report.close(f"{name} gate weights", got.weights.gather(1, order.indices), weights, 2e-6)
