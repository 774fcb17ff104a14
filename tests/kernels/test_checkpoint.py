import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.checkpoint import CheckpointError
from kernels.model import Model, load_model
from tests.kernels.conftest import GOLDEN

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "engram_token_map.json"):
        shutil.copy(GOLDEN / "mini" / name, tmp_path)
    return tmp_path


def text_tensors() -> Tensors:
    return {k: v for k, v in load_file(GOLDEN / "mini" / "model.safetensors").items() if not k.startswith("mtp.")}


def test_shards_and_fp32_norm_weights_load_alike(folder: Path, mini: Model) -> None:
    tensors = text_tensors()
    for name in tensors:
        if name.endswith(("q_weight", "k_weight")):
            tensors[name] = tensors[name].float()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    outputs = []
    for model in (load_model(folder), mini):
        pool = StatePool(model.config, 1, 64)
        outputs.append(model.logits(model.forward(Batch.all_rows([(pool.alloc(), 0, range(3, 40))]), pool)))
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("layers.4.attn.compressor.wgate.weight"), "layers.4.attn.compressor.wgate.weight is missing"),
        (lambda t: t.update({"norm.weight": torch.ones(95)}), "norm.weight has shape [95], expected [96]"),
        (
            lambda t: t.update({"layers.0.attn.wkv.weight": t["layers.0.attn.wkv.weight"].to(torch.float8_e4m3fn)}),
            "layers.0.attn.wkv.scale is missing",
        ),
        (
            lambda t: t.update({"layers.0.attn_norm.weight": torch.ones(96).to(torch.float8_e4m3fn)}),
            "layers.0.attn_norm.weight is F8_E4M3, expected BF16 or F32",
        ),
    ],
)
def test_a_wrong_tensor_is_named_with_its_file(folder: Path, change: Callable[[Tensors], object], named: str) -> None:
    tensors = text_tensors()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert named in str(error.value) and str(folder) in str(error.value)


def test_missing_and_broken_files(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not found"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(folder)
    (folder / "engram_token_map.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_model(folder)
