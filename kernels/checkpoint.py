"""Reading a checkpoint folder in the official layout: safetensors files and their tensor names (spec §1.3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PLAIN = (torch.bfloat16, torch.float32, torch.float16)


class CheckpointError(ValueError):
    """A file or tensor of the checkpoint is missing, unreadable or misshapen; the message names both."""


class Checkpoint:
    """The tensors of a folder by name, read when asked for. Raises CheckpointError."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[Path, Any] = {}
        index = self.folder / _INDEX
        if index.exists():
            try:
                names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index}: no weight_map: {error}") from None
            self._files = {name: self.folder / file for name, file in names.items()}
        else:
            path = self.folder / _SINGLE
            self._files = dict.fromkeys(self._handle(path).keys(), path)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A BF16, FP16 or FP32 tensor of `shape`, as contiguous fp32."""
        value = self.raw(name, shape)
        if value.dtype not in _PLAIN:
            raise CheckpointError(f"{self._files[name]}: {name} is {value.dtype}: quantised weights cannot be read yet")
        return value.to(torch.float32).contiguous()

    def raw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of `shape` in its stored type."""
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        path = self._files[name]
        try:
            value: torch.Tensor = self._handle(path).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: cannot read {name}: {error}") from None
        if tuple(value.shape) != shape:
            raise CheckpointError(f"{path}: {name} has shape {list(value.shape)}, expected {list(shape)}")
        return value

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(f"{path}: not found") from None
            except SafetensorError as error:
                raise CheckpointError(f"{path}: not a safetensors file: {error}") from None
        return self._open[path]
