"""The table of tensors against the published counts, the golden models, and what is not a tensor of them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from math import prod
from pathlib import Path

import pytest

from kernels.config import ModelConfig
from kernels.tensors import DTYPES, VALUE_BYTES, model_tensors, stored
from tests.kernels.conftest import GOLDEN

REAL = Path(__file__).parents[1] / "data" / "real_config.json"


@pytest.fixture(scope="module")
def real() -> ModelConfig:
    return ModelConfig.from_keys(json.loads(REAL.read_text()))


def test_published_counts_of_parameters(real: ModelConfig) -> None:
    counts: Counter[str] = Counter()
    for tensor in model_tensors(real):
        counts[tensor.part] += tensor.num_values
    assert counts == {
        "backbone": 551_880_835_184,
        "Engram tables": 196_613_849_600,
        "drafts": 14_225_362_530,
        "vision": 485_268_480,
    }
    assert counts.total() == 763_205_315_794


def test_published_counts_of_tensors_and_bytes(real: ModelConfig) -> None:
    tensors, parts, sizes = 0, Counter[str](), Counter[str]()
    for tensor in model_tensors(real):
        for part in stored(tensor, DTYPES[tensor.format][0]):
            tensors += 1
            parts[tensor.part] += 1
            sizes[part.dtypes[0]] += prod(part.shape) * VALUE_BYTES[part.dtypes[0]]
    assert tensors == 96_085
    assert (parts["drafts"], parts["vision"]) == (2_401, 266)
    assert {dtype: round(size / 1e7) for dtype, size in sizes.items()} == {
        "F8_E4M3": 20_402,
        "I8": 27_859,
        "F8_E8M0": 2_356,
        "BF16": 395,
        "F32": 17,
    }
    assert round(sizes.total() / 1e7) == 51_029
    names = [part.name for tensor in model_tensors(real) for part in stored(tensor, DTYPES[tensor.format][0])]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "shape", "scale"),
    [
        ("layers.0.attn.wq_b.weight", (32768, 1280), (1024, 40)),
        ("layers.1.engram.wkv.weight", (25600, 6144), (800, 192)),
        ("layers.14.engram.embed.weight", (384_016_682, 256), (384_016_682, 8)),
        ("layers.39.ffn.experts.383.w1.weight", (2304, 2560), (2304, 160)),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), (5120, 72)),
        ("layers.36.attn.indexer.wq_b.weight", (4096, 1280), (128, 40)),
        ("mtp.0.main_proj.weight", (5120, 15360), (160, 480)),
    ],
)
def test_shapes_in_files(real: ModelConfig, name: str, shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    tensor = next(tensor for tensor in model_tensors(real) if tensor.name == name)
    values, scales = stored(tensor, DTYPES[tensor.format][0])
    assert (values.shape, scales.shape) == (shape, scale)
    assert scales.name == name.replace("weight", "scale")


def test_one_routed_expert_takes_the_published_bytes(real: ModelConfig) -> None:
    expert = [tensor for tensor in model_tensors(real) if tensor.name.startswith("layers.7.ffn.experts.5.")]
    assert sum(prod(part.shape) for tensor in expert for part in stored(tensor, "I8")) == 18_800_640


def test_quantised_golden_model_has_these_tensors() -> None:
    header = json.loads((GOLDEN / "mini-quant" / "tensors.json").read_text())
    want: dict[str, list[object]] = {}
    for tensor in model_tensors(ModelConfig.from_folder(GOLDEN / "mini-quant")):
        for part in stored(tensor, DTYPES[tensor.format][0]):
            want[part.name] = [part.dtypes[0], list(part.shape)]
    assert header == want


def test_without_a_part_none_of_its_tensors() -> None:
    config = ModelConfig.from_folder(GOLDEN / "mini")
    assert {tensor.part for tensor in model_tensors(config)} == {"backbone", "Engram tables", "drafts"}
    plain = dataclasses.replace(config, num_nextn_predict_layers=0)
    assert not [tensor for tensor in model_tensors(plain) if tensor.name.startswith("mtp.")]
