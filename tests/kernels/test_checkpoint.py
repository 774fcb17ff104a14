"""Checkpoint folders: what is read of them, and what is said about bad ones, before and while values are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels.checkpoint
from kernels.audit import audit
from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.checkpoint import Checkpoint, CheckpointError
from kernels.config import ConfigError, ModelConfig
from kernels.model import Model, load_model
from kernels.shards import read_shards
from kernels.tensors import model_tensors
from run.settings import DEFAULT_MODEL
from tests.kernels.conftest import GOLDEN

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small golden model, less its tensors."""
    for name in ("config.json", "engram_token_map.json"):
        shutil.copy(GOLDEN / "mini" / name, tmp_path)
    return tmp_path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The bundled model: quantised, with drafts and vision."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(DEFAULT_MODEL / name, tmp_path)
    return tmp_path


def text_tensors() -> Tensors:
    return {k: v for k, v in load_file(GOLDEN / "mini" / "model.safetensors").items() if not k.startswith("mtp.")}


def split(folder: Path, tensors: Tensors) -> dict[str, str]:
    """Save as two shards with an index; the weight map."""
    names = sorted(tensors)
    shards = {"a.safetensors": names[1::2], "b.safetensors": names[::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_and_fp32_norm_weights_load_alike(folder: Path, mini: Model) -> None:
    tensors = text_tensors()
    for name in tensors:
        if name.endswith(("q_weight", "k_weight")):
            tensors[name] = tensors[name].float()
    split(folder, tensors)
    outputs = []
    for model in (load_model(folder), mini):
        pool = StatePool(model.config, 1, 64)
        outputs.append(model.logits(model.forward(Batch.all_rows([(pool.alloc(), 0, range(3, 40))]), pool)))
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("config", "folder"),
    [("mini/config.json", "mini"), ("mini/config_dense.json", "mini"), ("mini-vision/config.json", "mini-vision")],
)
def test_golden_models_have_no_problem(config: str, folder: str) -> None:
    keys = json.loads((GOLDEN / config).read_text())
    assert audit(ModelConfig.from_keys(keys), read_shards(GOLDEN / folder)) == []


def nan_scale(tensors: Tensors, name: str) -> None:
    tensors[name].view(torch.uint8)[1, 0] = 255


def nan_code(tensors: Tensors, name: str) -> None:
    tensors[name].view(torch.uint8)[2, 3] = 0x7F


E8M0 = torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("layers.2.attn.compressor.wgate.weight"), "layers.2.attn.compressor.wgate.weight is missing"),
        (lambda t: t.pop("layers.3.ffn.experts.5.w2.weight"), "layers.3.ffn.experts.5.w2.weight is missing"),
        (lambda t: t.pop("layers.3.ffn.experts.5.w2.scale"), "layers.3.ffn.experts.5.w2.scale is missing"),
        (lambda t: t.pop("layers.1.engram.embed.scale"), "layers.1.engram.embed.scale is missing"),
        (lambda t: t.pop("mtp.1.attn.wkv.weight"), "mtp.1.attn.wkv.weight is missing"),
        (lambda t: t.pop("vision.norm.weight"), "vision.norm.weight is missing"),
        (lambda t: t.update({"norm.weight": torch.ones(95)}), "norm.weight has shape [95], expected [128]"),
        (
            lambda t: t.update({"layers.0.attn.wkv.scale": torch.ones(4, 2).to(E8M0)}),
            "layers.0.attn.wkv.scale has shape [4, 2], expected [2, 4]",
        ),
        (
            lambda t: t.update({"layers.0.attn_norm.weight": torch.ones(128).to(torch.float8_e4m3fn)}),
            "layers.0.attn_norm.weight is F8_E4M3, expected BF16 or F32",
        ),
        (
            lambda t: t.update({"layers.0.attn.wkv.weight": torch.ones(64, 64).to(torch.uint8)}),
            "layers.0.attn.wkv.weight is U8, expected F8_E4M3 or BF16 or F32",
        ),
        (
            lambda t: t.update({"layers.0.attn.wkv.scale": torch.ones(2, 4)}),
            "layers.0.attn.wkv.scale is F32, expected F8_E8M0",
        ),
        (
            lambda t: t.update({"layers.0.ffn.experts.1.w1.weight": torch.ones(32, 128).bfloat16()}),
            "layers.0.ffn.experts.1.w1.weight is BF16, but layers.0.ffn.experts.0.w1.weight is I8",
        ),
        (lambda t: t.update({"layers.0.attn.q.weight": torch.ones(1)}), "layers.0.attn.q.weight is not a tensor of"),
        (lambda t: t.update({"layers.8.attn_sink": torch.ones(1)}), "layers.8.attn_sink is not a tensor of"),
        (lambda t: nan_scale(t, "layers.0.attn.wkv.scale"), "layers.0.attn.wkv.scale is not a number at [1, 0]"),
        (lambda t: nan_scale(t, "mtp.2.ffn.experts.3.w3.scale"), "mtp.2.ffn.experts.3.w3.scale is not a number at"),
        (lambda t: nan_scale(t, "layers.2.engram.embed.scale"), "layers.2.engram.embed.scale is not a number at"),
        (lambda t: nan_code(t, "layers.2.engram.embed.weight"), "layers.2.engram.embed.weight is not a number at"),
        (lambda t: nan_code(t, "layers.0.attn.wkv.weight"), "layers.0.attn.wkv.weight is not a number at [2, 3]"),
        (lambda t: t["head.weight"][7].fill_(torch.nan), "head.weight is not a number at [7, 0]"),
    ],
)
def test_a_bad_tensor_is_named_with_its_file(tiny: Path, change: Callable[[Tensors], object], named: str) -> None:
    tensors = load_file(tiny / "model.safetensors")
    change(tensors)
    save_file(tensors, tiny / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_model(tiny)
    assert f"{tiny / 'model.safetensors'}: {named}" in str(error.value)


def test_all_that_is_wrong_is_listed_at_once_up_to_a_limit(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    del tensors["layers.0.attn.wkv.weight"], tensors["layers.7.hc_ffn_fn"]
    save_file(tensors, tiny / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_model(tiny)
    # A scale without its matrix is not asked for.
    assert [line.split(": ", 1)[1] for line in str(error.value).splitlines()] == [
        "layers.0.attn.wkv.weight is missing",
        "layers.7.hc_ffn_fn is missing",
    ]
    save_file({name: tensors[name] for name in ("embed.weight", "norm.weight")}, tiny / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_model(tiny)
    lines = str(error.value).splitlines()
    # No draft or image tensor is there, so none is asked for; no scale either, but that of the two tables.
    asked = [t for t in model_tensors(ModelConfig.from_folder(tiny)) if t.part in ("backbone", "Engram tables")]
    assert len(lines) == 21 and lines[-1] == f"and {len(asked) + 2 - 2 - 20} more"


def test_a_truncated_file_is_named_with_the_first_tensor_cut(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated: 10 bytes are missing, from \S+ on"):
        load_model(tiny)
    path.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file: a header of"):
        load_model(tiny)


def test_missing_and_broken_files(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not found"):
        load_model(folder)
    for content in (b"", b"\x00" * 64, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x08\0\0\0\0\0\0\0" + b'{"a":{}}'):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
            load_model(folder)
    (folder / "engram_token_map.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f, _: (f / "b.safetensors").unlink(), "b.safetensors: not found"),
        (lambda f, _: (f / "b.safetensors").write_bytes(b"\x00" * 64), "b.safetensors: not a safetensors file"),
        (lambda f, m: m.update({"norm.weight": "a.safetensors"}), "norm.weight is here, but the index puts it into"),
        (lambda f, m: m.update({"norm.weight": "a.safetensors"}), "a.safetensors: norm.weight is not here, though"),
        (lambda f, m: m.pop("norm.weight"), "b.safetensors: norm.weight is here, but the index does not list it"),
        (lambda f, m: m.update({"norm.weight": "../a.safetensors"}), "'../a.safetensors' is not the name of a file"),
        (lambda f, m: m.update({"norm.weight": None}), f"{INDEX}: no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files(
    folder: Path, change: Callable[[Path, dict[str, Any]], object], named: str
) -> None:
    weight_map: dict[str, Any] = split(folder, text_tensors())
    assert weight_map["norm.weight"] == "b.safetensors"
    change(folder, weight_map)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert named in str(error.value) and str(folder) in str(error.value)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    tensors = text_tensors()
    split(folder, tensors)
    part = load_file(folder / "a.safetensors") | {"norm.weight": tensors["norm.weight"]}
    save_file(part, folder / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: norm\.weight is here, but the index puts it into b\."):
        load_model(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: no weight_map"):
        load_model(folder)


def test_an_index_alone_cannot_be_loaded_but_its_names_are_checked(folder: Path) -> None:
    split(folder, text_tensors())
    config = ModelConfig.from_folder(folder)
    for file in ("a", "b"):
        (folder / f"{file}.safetensors").unlink()
    assert audit(config, read_shards(folder)) == []
    with pytest.raises(CheckpointError, match="none of its files is there"):
        load_model(folder)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["norm.weight"]
    index["weight_map"] |= {"layers.0.attn.wkv.scale": "a.safetensors", "norm.bias": "a.safetensors"}
    (folder / INDEX).write_text(json.dumps(index))
    problems = [problem.what for problem in audit(config, read_shards(folder))]
    assert problems[0] == "norm.weight is missing"
    # One scale says that matrices of its kind are quantised, so all the others lack theirs.
    assert "layers.9.attn.wq_a.scale is missing" in problems and "layers.0.attn.wkv.scale is missing" not in problems
    assert problems[-1] == "norm.bias is not a tensor of this model"


@pytest.mark.parametrize(
    ("key", "value", "error", "named"),
    [
        ("head_dim", "64", ConfigError, r"config\.json: text_config\.head_dim must be int"),
        ("head_dim", None, ConfigError, r"config\.json: text_config\.head_dim must be int"),
        ("moe_intermediate_size", 32, CheckpointError, r"w1\.weight has shape \[64, 64\], expected \[32, 64\]"),
        ("num_hidden_layers", 7, ConfigError, r"dspark_target_layer_ids"),
        ("engram_num_embeddings", [1, 1], CheckpointError, r"engram\.embed\.weight has shape \[\d+, 32\], expected"),
    ],
)
def test_a_wrong_key_of_the_configuration(tiny: Path, key: str, value: Any, error: type, named: str) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config["text_config"][key] = value
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=named):
        load_model(tiny)


def sparse(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A file of zeros that takes no room: name -> type, shape, bytes."""
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def resident_bytes(path: Path) -> int:
    """How much of a file is mapped and has been touched by this process."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.checkpoint, "MAX_CHECKED_BYTES", 64 << 20)  # of a table: ours is larger by a row
    n, k, mib = 1024, 2048, 1 << 20
    tensors: dict[str, tuple[str, list[int], int]] = {"table.weight": ("F8_E4M3", [mib + 1, 64], 64 * (mib + 1))}
    tensors["table.scale"] = ("F8_E8M0", [mib + 1, 2], 2 * (mib + 1))
    for expert in range(32):
        tensors[f"{expert}.w1.weight"] = ("I8", [n, k // 2], n * k // 2)
        tensors[f"{expert}.w1.scale"] = ("F8_E8M0", [n, k // 32], n * k // 32)
    path = tmp_path / "model.safetensors"
    sparse(path, tensors)
    checkpoint = Checkpoint(tmp_path)
    assert resident_bytes(path) == 0
    # A quarter of the experts, as a rank of four would.
    share = checkpoint.experts([str(expert) for expert in range(8, 16)], ["w1"], n, k)
    assert share.values.shape == (8, n, k) and share.quantized
    read = 8 * n * k * 17 // 32
    assert read <= resident_bytes(path) < read + mib
    codes, _ = checkpoint.table("table", mib + 1, 64)
    read += 2 * mib  # the scales are checked
    assert read <= resident_bytes(path) < read + mib
    assert not codes[[5, mib]].float().any()  # a row is read when looked up
    assert resident_bytes(path) < read + mib


def test_a_file_may_be_larger_than_memory(tmp_path: Path) -> None:
    size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sparse(tmp_path / "model.safetensors", {"large": ("F32", [size // 4], size), "small": ("F32", [4], 16)})
    assert Checkpoint(tmp_path).tensor("small", 4).tolist() == [0, 0, 0, 0]


def test_a_share_of_experts_is_those_experts() -> None:
    checkpoint = Checkpoint(DEFAULT_MODEL)
    names = [f"layers.4.ffn.experts.{expert}" for expert in (6, 1)]
    share = checkpoint.experts(names, ["w1", "w3"], 64, 128)
    for values, name in zip(share.values, names, strict=True):
        parts = [checkpoint.matrix(f"{name}.{part}", 64, 128).values for part in ("w1", "w3")]
        assert torch.equal(values, torch.cat(parts))
    assert not torch.equal(share.values[0], share.values[1])


def test_reading_says_what_it_expected() -> None:
    checkpoint = Checkpoint(DEFAULT_MODEL)
    for read, named in (
        (lambda: checkpoint.tensor("nothing", 4), "nothing is missing"),
        (lambda: checkpoint.matrix("nothing", 4, 32), r"nothing\.weight is missing"),
        (lambda: checkpoint.tensor("norm.weight", 4), r"norm\.weight has shape \[128\], expected \[4\]"),
        (lambda: checkpoint.tensor("layers.0.attn.wkv.weight", 64, 128), "is F8_E4M3, expected BF16 or F32"),
        (lambda: checkpoint.matrix("layers.0.ffn.gate", 8, 64), r"has shape \[8, 128\], expected \[8, 64\]"),
    ):
        with pytest.raises(CheckpointError, match=named) as error:
            read()
        assert str(DEFAULT_MODEL) in str(error.value)
