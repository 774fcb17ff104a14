"""Reading the values of a checkpoint folder in the official layout (spec §1.3)."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from kernels.audit import audit, refuse
from kernels.config import ModelConfig
from kernels.ops.experts import Fp4Weights
from kernels.ops.linear import Fp8Weight
from kernels.ops.quant import dequantize_blocks, dequantize_fp4
from kernels.shards import CheckpointError as CheckpointError
from kernels.shards import read_shards
from kernels.tensors import FP8, PACKED, PLAIN

_TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_CPU = torch.device("cpu")
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # not yet named in Python 3.11
_NAN_CODE = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF}  # less the sign
_CHUNK_VALUES = 1 << 20
MAX_CHECKED_BYTES = 1 << 30
"""Codes of a larger table are not looked at when it is loaded: that would read all of it."""


class Weight(NamedTuple):
    """A matrix `[n, k]`, or one per expert, and whether it is stored quantised: then its input is too.

    In fp32 on a CPU; on a GPU as stored where there is a kernel for that.
    """

    values: torch.Tensor | Fp8Weight | Fp4Weights
    quantized: bool

    @property
    def fp32(self) -> torch.Tensor:
        if isinstance(self.values, Fp8Weight):
            return dequantize_blocks(*self.values)
        if isinstance(self.values, Fp4Weights):
            codes, scale = self.values
            return dequantize_fp4(codes.flatten(0, 1), scale.flatten(0, 1)).view(*codes.shape[:2], -1)
        return self.values

    def __len__(self) -> int:
        return len(self.values.codes if isinstance(self.values, Fp8Weight) else self.values)


class Checkpoint:
    """The tensors of a folder by name. Files are mapped into memory: what nobody asks for is never read. What is read
    goes to `device`, tables excepted.

    Every method raises CheckpointError, which names file and tensor, also when a value is not a number.
    """

    def __init__(self, folder: str | Path, device: torch.device = _CPU) -> None:
        """Reads the index and the headers of all files."""
        self._shards = read_shards(folder)
        refuse(self._shards.problems)
        self._shards.need_files()
        self._maps: dict[Path, mmap.mmap] = {}
        self.device = device

    def __contains__(self, name: str) -> bool:
        return name in self._shards.entries

    def verify(self, config: ModelConfig) -> None:
        """Hold all names, shapes and types against `config`; one error lists all that is wrong."""
        refuse(audit(config, self._shards))

    def check(self, name: str, tell: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Read a tensor as it lies in its file, in chunks, and refuse it if a value is not a number.

        `tell` hears of the bytes of each chunk. Any packed FP4 code is a number, so these are not read.
        """
        entry = self._shards.entries[name]
        values = self._stored(name, entry.shape, (entry.dtype,)).view(-1)
        for start in range(0, len(values), _CHUNK_VALUES):
            part = values[start : start + _CHUNK_VALUES]
            if entry.dtype not in PACKED and (bad := _first_bad(part)) is not None:
                place = [int(one) for one in np.unravel_index(start + bad, entry.shape)]
                self._refuse_value(name, place)
            tell(part.nbytes)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A BF16 or FP32 tensor of `shape`, as contiguous fp32."""
        value = self._stored(name, shape, PLAIN).to(torch.float32).contiguous()
        self._check_numbers(name, value)
        return value.to(self.device)

    def matrix(self, name: str, n: int, k: int) -> Weight:
        """The `{name}.weight` `[n, k]` of a linear layer: plain, or FP8 (E4M3) or packed FP4 with `{name}.scale`."""
        entry = self._shards.entries.get(f"{name}.weight")
        if self.device != _CPU and entry is not None and entry.dtype == FP8:
            return Weight(self._fp8(name, n, k), True)
        values = torch.empty(n, k)
        quantized = self._fill(values, name)
        return Weight(values.to(self.device), quantized)

    def experts(self, names: Sequence[str], parts: Sequence[str], n: int, k: int) -> Weight:
        """The matrices `{name}.{part}` `[n, k]` as `[names, parts * n, k]`: of some experts, no other is touched."""
        each = [f"{name}.{part}" for name in names for part in parts]
        types = {self._shards.entries[f"{one}.weight"].dtype for one in each if f"{one}.weight" in self}
        if self.device != _CPU and types <= set(PACKED):
            return Weight(self._fp4(each, len(names), n, k), True)
        values = torch.empty(len(names), len(parts), n, k)
        quantized = [
            self._fill(values[row, column], f"{name}.{part}")
            for row, name in enumerate(names)
            for column, part in enumerate(parts)
        ]
        return Weight(values.flatten(1, 2).to(self.device), all(quantized))

    def table(self, name: str, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """E4M3 codes `[rows, dim]` and E8M0 scales `[rows, dim / 32]`, both as stored: a row is read when looked up.

        They stay on the host. Scales are checked now, which reads them; so are codes, up to 1 GiB of them. Larger
        tables are trusted: `shoal checkpoint inspect --values` reads them.
        """
        codes = self._stored(f"{name}.weight", (rows, dim), (FP8,))
        if codes.nbytes <= MAX_CHECKED_BYTES:
            self.check(f"{name}.weight")
        return codes, self._scale(name, rows, dim // 32)

    def _fp8(self, name: str, n: int, k: int) -> Fp8Weight:
        codes, scale = self._stored(f"{name}.weight", (n, k), (FP8,)), self._scale(name, -(-n // 32), k // 32)
        self.check(f"{name}.weight")
        return Fp8Weight(codes.to(self.device), scale.to(self.device))

    def _fp4(self, names: Sequence[str], num: int, n: int, k: int) -> Fp4Weights:
        """Matrices `[n, k]` of `num` experts, those of one expert below one another."""
        codes = [self._stored(f"{name}.weight", (n, k // 2), PACKED).to(self.device) for name in names]
        scales = [self._scale(name, n, k // 32).view(torch.uint8).to(self.device) for name in names]
        scale = torch.cat(scales).view(num, -1, k // 32).view(torch.float8_e8m0fnu)
        return Fp4Weights(torch.cat(codes).view(num, -1, k // 2), scale)

    def _fill(self, values: torch.Tensor, name: str) -> bool:
        """Read `{name}.weight` into `values` [n, k]; whether it is stored quantised."""
        (n, k), weight = values.shape, f"{name}.weight"
        dtype = self._shards.entries[weight].dtype if weight in self else ""
        if dtype == FP8:
            codes = self._stored(weight, (n, k), (FP8,))
            values.copy_(dequantize_blocks(codes, self._scale(name, -(-n // 32), k // 32)))
        elif dtype in PACKED:
            codes = self._stored(weight, (n, k // 2), PACKED)
            values.copy_(dequantize_fp4(codes, self._scale(name, n, k // 32)))
        else:
            values.copy_(self._stored(weight, (n, k), PLAIN))
        self._check_numbers(weight, values)
        return dtype not in PLAIN

    def _scale(self, name: str, *shape: int) -> torch.Tensor:
        name = f"{name}.scale"
        scale = self._stored(name, shape, ("F8_E8M0",))
        self.check(name)
        return scale

    def _check_numbers(self, name: str, value: torch.Tensor) -> None:
        if (bad := _first_bad(value)) is not None:
            self._refuse_value(name, [int(one) for one in np.unravel_index(bad, value.shape)])

    def _refuse_value(self, name: str, place: list[int]) -> NoReturn:
        raise CheckpointError(f"{self._shards.files[name]}: {name} is not a number at {place}")

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> torch.Tensor:
        """A tensor as it lies in its file: mapped, not read."""
        entry = self._shards.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._shards.path}: {name} is missing")
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{entry.path}: {name} is {entry.dtype}, expected {' or '.join(dtypes)}")
        if entry.shape != shape:
            raise CheckpointError(f"{entry.path}: {name} has shape {list(entry.shape)}, expected {list(shape)}")
        if entry.path not in self._maps:
            self._maps[entry.path] = _map(entry.path)
        file, dtype = self._maps[entry.path], _TYPES[entry.dtype]
        try:
            return torch.frombuffer(file, dtype=dtype, count=prod(shape), offset=entry.offset).view(shape)
        except ValueError as error:
            raise CheckpointError(f"{entry.path}: cannot read {name}: {error}") from None


def _first_bad(values: torch.Tensor) -> int | None:
    """The first, in their order, that is not a number."""
    if values.dtype in _NAN_CODE:
        mask = _NAN_CODE[values.dtype]
        codes = values.view(torch.uint8) & mask
        # No code is larger; a maximum takes a tenth of the time of comparing each.
        return None if int(codes.max()) < mask else int(codes.view(-1).argmax())
    # A sum is not a number as soon as one value is not, and takes no room.
    if not bool(values.sum().isnan()):
        return None
    bad = values.isnan().view(-1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def _map(path: Path) -> mmap.mmap:
    """A file as memory; it may be larger than memory is, so none is set aside for copies of what is written to."""
    try:
        with path.open("rb") as file:
            flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=prot)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be mapped: {error}") from None
