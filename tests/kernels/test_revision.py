"""Checkpoints of other weights have other revisions; the same weights in other files have not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.revision import revision
from kernels.shards import INDEX, CheckpointError
from run.settings import DEFAULT_MODEL

Tensors = dict[str, torch.Tensor]


def bump(tensors: Tensors, name: str, place: int) -> None:
    """Change one byte of a tensor's data."""
    tensors[name].view(torch.uint8).view(-1)[place] ^= 1


def rename(tensors: Tensors) -> None:
    tensors["norm.weights"] = tensors.pop("norm.weight")


def reshape(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].view(2, -1)


def retype(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].view(torch.int16)


def exchange(tensors: Tensors) -> None:
    first, second = "layers.1.attn.q_norm.weight", "layers.2.attn.q_norm.weight"
    bump(tensors, first, 0)
    tensors[first], tensors[second] = tensors[second], tensors[first]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DEFAULT_MODEL / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: bump(tensors, "embed.weight", 0),
        lambda tensors: bump(tensors, "embed.weight", 63),
        lambda tensors: bump(tensors, "head.weight", -1),
        lambda tensors: bump(tensors, "norm.weight", -64),
        *(rename, reshape, retype, exchange),
    ],
)
def test_what_is_another_checkpoint(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(DEFAULT_MODEL / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert revision(folder) != revision(DEFAULT_MODEL)


def test_the_configuration_counts(folder: Path) -> None:
    shutil.copy(DEFAULT_MODEL / "model.safetensors", folder)
    assert revision(folder) == revision(DEFAULT_MODEL)
    (folder / "config.json").write_text((DEFAULT_MODEL / "config.json").read_text().replace("10000", "10001"))
    assert revision(folder) != revision(DEFAULT_MODEL)


def test_files_and_their_order_do_not(folder: Path) -> None:
    tensors = load_file(DEFAULT_MODEL / "model.safetensors")
    names = sorted(tensors)
    parts = {"b.safetensors": names[:100], "a.safetensors": names[100:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert revision(folder) == revision(DEFAULT_MODEL)
    for file in parts:
        (folder / file).unlink()
    with pytest.raises(CheckpointError, match="none of its files"):
        revision(folder)
