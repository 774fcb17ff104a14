"""Writing a checkpoint in the official layout: how values become codes and scales, and files (spec §1.3)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernels.shards import INDEX, SINGLE
from kernels.tensors import Format, scale_name

_SHARD_BYTES = 4 << 30
_FP8_MAX, _FP4_MAX = 448.0, 6.0
# The largest value that still rounds to the largest code. A group's scale is the smallest power of two that brings its
# largest value down to this: nothing saturates by more than it rounds, and quantising what was read back, whose
# largest value may have been rounded, finds the same scale and codes.
_FP8_REACH, _FP4_REACH = 464.0, 7.0
# Between neighbours a value in the middle goes to the even code: down, up, down, ... (bucketize goes down).
_MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_MIDDLES[1::2] = torch.nextafter(_MIDDLES[1::2], torch.zeros(3))


def quantize_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[n, k]` -> E4M3 codes `[n, k]`, E8M0 scale per 32 x 32 block `[ceil(n / 32), k / 32]`.

    Raises ValueError for values that are not finite.
    """
    n, k = values.shape
    blocks = torch.nn.functional.pad(values.abs(), (0, 0, 0, -n % 32)).view(-1, 32, k // 32, 32)
    exponent = _exponent(blocks.amax((1, 3)), _FP8_REACH)
    wide = exponent.repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)
    return _fp8_codes(torch.ldexp(values, -wide)), _scale(exponent)


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[rows, dim]` -> E4M3 codes, E8M0 scale per row and 32 columns `[rows, dim / 32]`. Raises ValueError."""
    groups = values.reshape(len(values), -1, 32)
    exponent = _exponent(groups.abs().amax(2), _FP8_REACH)
    return _fp8_codes(torch.ldexp(groups, -exponent.unsqueeze(2)).flatten(1)), _scale(exponent)


def quantize_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[n, k]` -> packed E2M1, int8 `[n, k / 2]`, low half first; E8M0 scale `[n, k / 32]`. Raises ValueError."""
    groups = values.reshape(len(values), -1, 32)
    exponent = _exponent(groups.abs().amax(2), _FP4_REACH)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(2)).flatten(1)
    codes = (torch.bucketize(scaled.abs(), _MIDDLES) + 8 * scaled.signbit()).to(torch.uint8)
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).view(torch.int8), _scale(exponent)


def encode(name: str, values: torch.Tensor, form: Format) -> dict[str, torch.Tensor]:
    """The tensors of a file for `values` fp32, as the format is published: with a scale where it has one."""
    if form == "fp32":
        return {name: values.to(torch.float32)}
    if form == "bf16":
        return {name: values.to(torch.bfloat16)}
    quantize = {"fp8": quantize_blocks, "fp4": quantize_fp4, "table": quantize_rows}[form]
    codes, scale = quantize(values)
    return {name: codes, scale_name(name): scale}


def save(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = _SHARD_BYTES) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor gets its own) with an index.

    One shard is held in memory at a time. The same tensors in the same order give the same bytes.
    """
    shards: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > shard_bytes:
            _write(folder, part, shards)
            part, size = {}, 0
        part[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    _write(folder, part, shards)
    if len(shards) == 1:
        _unfinished(folder, 1).replace(folder / SINGLE)
        (folder / INDEX).unlink(missing_ok=True)  # of an older checkpoint: it would win over the file
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _unfinished(folder, number).replace(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _write(folder: Path, part: dict[str, torch.Tensor], shards: list[list[str]]) -> None:
    shards.append(list(part))
    path = _unfinished(folder, len(shards))
    path.touch()
    mode = path.stat().st_mode
    save_file(part, path)  # readable by its owner only, whatever the umask says
    path.chmod(mode)


def _unfinished(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05}.unfinished"


def _exponent(largest: torch.Tensor, reach: float) -> torch.Tensor:
    """Per group the smallest e with `largest` <= `reach` 2**e, as int32; 0 for a group of zeros."""
    if not bool(largest.isfinite().all()):
        raise ValueError("only finite values can be quantised")
    # Both as m 2**e with m in [0.5, 1).
    mantissa, exponent = torch.frexp(largest)
    limit, shift = torch.frexp(torch.tensor(reach))
    exponent = exponent - shift + (mantissa > limit)
    return torch.where(largest > 0, exponent, 0).clamp(-127, 127).to(torch.int32)


def _fp8_codes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _scale(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
