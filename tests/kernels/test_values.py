"""Values that are no numbers, whatever the type and wherever they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kernels.checkpoint
from kernels.checkpoint import Checkpoint, CheckpointError


def test_what_is_not_a_number_is_found_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.checkpoint, "_CHUNK_VALUES", 7)
    tensors = {"a": torch.zeros(5, 3), "b": torch.ones(5, 4).to(torch.float8_e4m3fn), "c": torch.zeros(())}
    for place in (None, (0, 0), (3, 2), (4, 2)):
        if place is not None:
            tensors["a"], tensors["b"] = torch.zeros(5, 3).bfloat16(), torch.ones(5, 4).to(torch.float8_e4m3fn)
            tensors["a"][place], tensors["b"].view(torch.uint8)[place] = torch.nan, 0xFF
        save_file(tensors, tmp_path / "model.safetensors")
        checkpoint = Checkpoint(tmp_path)
        for name, tensor in tensors.items():
            sizes: list[int] = []
            if place is None or name == "c":
                checkpoint.check(name, sizes.append)
                assert sum(sizes) == tensor.nbytes and max(sizes, default=0) <= 7 * tensor.element_size()
            else:
                with pytest.raises(CheckpointError, match=rf"{name} is not a number at \[{place[0]}, {place[1]}\]"):
                    checkpoint.check(name, sizes.append)
