"""Reading a checkpoint folder in the official layout: safetensors files and their tensor names (spec §1.3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kernels.ops.quant import dequantize_blocks, dequantize_fp4

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PLAIN = (torch.bfloat16, torch.float32, torch.float16)


class CheckpointError(ValueError):
    """A file or tensor of the checkpoint is missing, unreadable or misshapen; the message names both."""


class Weight(NamedTuple):
    """A matrix `[n, k]` in fp32, and whether it is stored quantised: then its input is quantised too."""

    values: torch.Tensor
    quantized: bool


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

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A BF16, FP16 or FP32 tensor of `shape`, as contiguous fp32."""
        value = self.raw(name, shape)
        if value.dtype not in _PLAIN:
            raise CheckpointError(f"{self._files[name]}: {name} is {value.dtype}, expected BF16 or FP32")
        return value.to(torch.float32).contiguous()

    def matrix(self, name: str, n: int, k: int) -> Weight:
        """The `{name}.weight` `[n, k]` of a linear layer: plain, or FP8 (E4M3) or packed FP4 with `{name}.scale`."""
        weight = f"{name}.weight"
        if weight not in self._files:
            raise CheckpointError(f"{self.folder}: tensor {weight} is missing")
        dtype = self._dtype(weight)
        if dtype == "F8_E4M3":
            scale = self.raw(f"{name}.scale", (-(-n // 32), k // 32))
            return Weight(dequantize_blocks(self.raw(weight, (n, k)), scale), True)
        if dtype in ("I8", "U8"):
            scale = self.raw(f"{name}.scale", (n, k // 32))
            return Weight(dequantize_fp4(self.raw(weight, (n, k // 2)), scale), True)
        return Weight(self.tensor(weight, n, k), False)

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

    def _dtype(self, name: str) -> str:
        path = self._files[name]
        try:
            return str(self._handle(path).get_slice(name).get_dtype())
        except SafetensorError as error:
            raise CheckpointError(f"{path}: cannot read {name}: {error}") from None

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(f"{path}: not found") from None
            except SafetensorError as error:
                raise CheckpointError(f"{path}: not a safetensors file: {error}") from None
        return self._open[path]
