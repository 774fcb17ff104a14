"""What is trained, by the official names; experts of a layer are stacked. How it begins, and how it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from kernels.checkpoint import Checkpoint
from kernels.config import ModelConfig
from kernels.ops.quant import dequantize_blocks, dequantize_fp4, dequantize_rows
from kernels.storage import encode, quantize_blocks, quantize_fp4, quantize_rows, save
from kernels.tensors import Format, Tensor, model_tensors
from run.train.layers import straight_through

Parameters = dict[str, torch.Tensor]


def stacked_name(name: str) -> tuple[str, int | None]:
    """`layers.2.ffn.experts.5.w1.weight` -> (`layers.2.ffn.experts.w1.weight`, 5); other names stay, with None."""
    before, found, after = name.partition(".experts.")
    if not found:
        return name, None
    number, _, rest = after.partition(".")
    return f"{before}.experts.{rest}", int(number)


def is_draft(name: str) -> bool:
    """Whether a parameter is of the draft stages."""
    return name.startswith("mtp.")


def stacked(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], Format, str]]:
    """Shape, format and role of every parameter."""
    found: dict[str, tuple[tuple[int, ...], Format, str]] = {}
    for tensor in model_tensors(config):
        name, number = stacked_name(tensor.name)
        shape = tensor.shape if number is None else (number + 1, *tensor.shape)
        found[name] = (shape, tensor.format, tensor.role)
    return found


def initial(config: ModelConfig, seed: int) -> Parameters:
    """Values that training begins with. What adds to the residual begins at zero, so every layer begins as nothing."""
    draw = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, (shape, _, role) in stacked(config).items():
        noise = torch.randn(shape, generator=draw)
        parameters[name] = _begin(name, noise, role, config)
    return parameters


def _begin(name: str, noise: torch.Tensor, role: str, config: ModelConfig) -> torch.Tensor:
    if role == "norms" or name.endswith(("engram.q_weight", "engram.k_weight")):
        return torch.ones_like(noise)
    if role == "stream mix":
        return _begin_mix(name, noise, config.hc_mult)
    if name.endswith((".bias", "bias_vl", "attn_sink", "wo_b.weight", "w2.weight")) and not name.startswith("aligner"):
        return torch.zeros_like(noise)
    if name == "head.weight" or name.endswith(("markov_head.head.weight", "confidence_head.proj.weight")):
        return torch.zeros_like(noise)
    if name.startswith("image_") or name.endswith("embed.weight"):
        return noise.mul(0.5)
    scaled = noise.mul(noise.shape[-1] ** -0.5)
    return scaled.mul(0.5) if name.endswith("gate.weight") else scaled


def _begin_mix(name: str, noise: torch.Tensor, streams: int) -> torch.Tensor:
    """Streams keep to themselves and are read alike; a little noise, or they would stay each other's copies."""
    if name.endswith("fn"):
        return noise.mul(noise.shape[1] ** -0.5)
    if name.endswith("scale"):
        return torch.full_like(noise, 0.1)
    base = torch.cat((torch.full((streams,), -1.1), torch.zeros(streams), 2 * torch.eye(streams).flatten()))
    return base + 0.5 * noise


def as_stored(parameters: Parameters, config: ModelConfig) -> Parameters:
    """What a loader will read of the checkpoint: quantised parameters rounded, with the gradients of the unrounded."""
    formats = stacked(config)
    return {name: _stored(value, formats[name][1]) for name, value in parameters.items()}


def _stored(value: torch.Tensor, form: Format) -> torch.Tensor:
    if form == "fp8":
        return straight_through(value, lambda x: dequantize_blocks(*quantize_blocks(x)))
    if form == "fp4":
        return straight_through(value, lambda x: dequantize_fp4(*quantize_fp4(x.flatten(0, 1))).view(x.shape))
    if form == "table":
        return straight_through(value, lambda x: dequantize_rows(*quantize_rows(x)))
    return value


def write(folder: Path, parameters: Parameters, config: ModelConfig) -> None:
    """`model.safetensors` in the official layout."""
    save(folder, _encoded(parameters, model_tensors(config)))


def _encoded(parameters: Parameters, tensors: tuple[Tensor, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in tensors:
        name, number = stacked_name(tensor.name)
        value = parameters[name].detach()
        yield from encode(tensor.name, value if number is None else value[number], tensor.format).items()


def read(folder: Path, config: ModelConfig) -> Parameters:
    """The values of a checkpoint folder. Raises CheckpointError."""
    checkpoint = Checkpoint(folder)
    checkpoint.verify(config)
    found: dict[str, list[torch.Tensor]] = {}
    for tensor in model_tensors(config):
        found.setdefault(stacked_name(tensor.name)[0], []).append(_value(checkpoint, tensor))
    return {name: torch.stack(values) if ".experts." in name else values[0] for name, values in found.items()}


def _value(checkpoint: Checkpoint, tensor: Tensor) -> torch.Tensor:
    if tensor.format == "table":
        return dequantize_rows(*checkpoint.table(tensor.name.removesuffix(".weight"), *tensor.shape))
    if tensor.format in ("fp8", "fp4"):
        return checkpoint.matrix(tensor.name.removesuffix(".weight"), *tensor.shape).fp32
    return checkpoint.tensor(tensor.name, *tensor.shape)


def digest(parameters: Parameters) -> str:
    """64 hexadecimal digits, which say whether these are the same values."""
    found = hashlib.sha256()
    for name, value in sorted(parameters.items()):
        found.update(name.encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
