"""The tensors that a configuration asks for, by their official names (spec §1.3)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from kernels.config import LayerRole, ModelConfig

# How a tensor is published. "fp8": E4M3 with a scale per 32 x 32 block; "fp4": packed E2M1 with a scale per row and
# 32 columns; "table": E4M3 rows with a scale per 32 columns. Scales are E8M0, a tensor of their own.
Format = Literal["fp8", "fp4", "table", "bf16", "fp32"]
Part = Literal["backbone", "Engram tables", "drafts", "vision"]

PLAIN = ("BF16", "F32")
PACKED = ("I8", "U8")
FP8, SCALE = "F8_E4M3", "F8_E8M0"
# What may lie in a file, in safetensors' words, the published type first: quantised matrices may also come plain.
DTYPES: dict[Format, tuple[str, ...]] = {
    "fp8": (FP8, *PLAIN),
    "fp4": (*PACKED, FP8, *PLAIN),
    "table": (FP8,),
    "bf16": ("BF16", "F32"),
    "fp32": ("F32", "BF16"),
}
VALUE_BYTES = {FP8: 1, SCALE: 1, "I8": 1, "U8": 1, "BF16": 2, "F32": 4}


class Tensor(NamedTuple):
    """A tensor of the model, its scale included. `shape` counts values, not bytes; `role` says what it is for."""

    name: str
    shape: tuple[int, ...]
    format: Format
    part: Part
    role: str

    @property
    def num_values(self) -> int:
        return prod(self.shape)


class Stored(NamedTuple):
    """A tensor of a file: one of the model's, or the scale of one."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def scale_name(name: str) -> str:
    """The scale that belongs to a quantised `*.weight`."""
    return name.removesuffix("weight") + "scale"


def stored(tensor: Tensor, dtype: str) -> tuple[Stored, ...]:
    """What lies in the files for `tensor` when its values are of type `dtype`, the values first."""
    if dtype in PLAIN:
        return (Stored(tensor.name, tensor.shape, DTYPES[tensor.format]),)
    n, k = tensor.shape
    packed, per_row = dtype in PACKED, dtype in PACKED or tensor.format == "table"
    values = Stored(tensor.name, (n, k // 2) if packed else (n, k), DTYPES[tensor.format])
    scale = Stored(scale_name(tensor.name), (n if per_row else -(-n // 32), k // 32), (SCALE,))
    return values, scale


def model_tensors(config: ModelConfig) -> tuple[Tensor, ...]:
    """Every tensor of the model: backbone, Engram tables, draft stages and image tower where `config` has them."""
    c = config
    tensors = [
        Tensor("embed.weight", (c.vocab_size, c.hidden_size), "bf16", "backbone", "embedding"),
        Tensor("head.weight", (c.vocab_size, c.hidden_size), "bf16", "backbone", "head"),
        Tensor("norm.weight", (c.hidden_size,), "bf16", "backbone", "norms"),
    ]
    for layer in c.layers:
        tensors += _layer(c, layer)
    for stage in c.draft_stages:
        tensors += _layer(c, stage)
    tensors += _draft_ends(c)
    tensors += _vision(c)
    return tuple(tensors)


def _layer(c: ModelConfig, layer: LayerRole) -> Iterator[Tensor]:
    part: Part = "drafts" if layer.mode == "draft" else "backbone"

    def tensor(name: str, form: Format, role: str, *shape: int) -> Tensor:
        return Tensor(f"{layer.name}.{name}", shape, form, part, role)

    dim, inter, heads = c.hidden_size, c.moe_intermediate_size, c.num_attention_heads
    low, grouped = c.q_lora_rank, c.o_groups * c.o_lora_rank
    for name, size in (("attn_norm", dim), ("ffn_norm", dim), ("attn.q_norm", low), ("attn.kv_norm", c.head_dim)):
        yield tensor(f"{name}.weight", "bf16", "norms", size)
    yield tensor("attn.wq_a.weight", "fp8", "attention", low, dim)
    yield tensor("attn.wq_b.weight", "fp8", "attention", heads * c.head_dim, low)
    yield tensor("attn.wkv.weight", "fp8", "attention", c.head_dim, dim)
    yield tensor("attn.wo_a.weight", "fp8", "attention", grouped, heads * c.head_dim // c.o_groups)
    yield tensor("attn.wo_b.weight", "fp8", "attention", dim, grouped)
    yield tensor("attn.attn_sink", "fp32", "attention", heads)
    if layer.owns_kv:
        yield tensor("attn.compressor.wkv.weight", "bf16", "compressor", c.head_dim, dim)
        if layer.ratio == 2:
            yield tensor("attn.compressor.wgate.weight", "bf16", "compressor", c.head_dim, dim)
        yield tensor("attn.compressor.norm.weight", "bf16", "norms", c.head_dim)
        yield tensor("attn.indexer.wk.weight", "bf16", "indexer", c.index_head_dim, c.head_dim)
        yield tensor("attn.indexer.k_norm.weight", "bf16", "norms", c.index_head_dim)
    if layer.owns_index:
        yield tensor("attn.indexer.wq_b.weight", "fp8", "indexer", c.index_n_heads * c.index_head_dim, low)
        yield tensor("attn.indexer.weights_proj.weight", "bf16", "indexer", c.index_n_heads, dim)
    coefficients = (2 + c.hc_mult) * c.hc_mult
    for which in ("attn", "ffn"):
        yield tensor(f"hc_{which}_fn", "fp32", "stream mix", coefficients, c.hc_mult * dim)
        yield tensor(f"hc_{which}_base", "fp32", "stream mix", coefficients)
        yield tensor(f"hc_{which}_scale", "fp32", "stream mix", 3)
    yield tensor("ffn.gate.weight", "bf16", "router", layer.num_experts, dim)
    yield tensor("ffn.gate.bias", "fp32", "router", layer.num_experts)
    yield tensor("ffn.gate.bias_vl", "fp32", "router", layer.num_experts)
    for name, form, role in _experts(layer):
        yield tensor(f"ffn.{name}.w1.weight", form, role, inter, dim)
        yield tensor(f"ffn.{name}.w2.weight", form, role, dim, inter)
        yield tensor(f"ffn.{name}.w3.weight", form, role, inter, dim)
    if layer.engram is not None:
        rows, width = c.engram_num_embeddings[layer.engram], (c.engram_max_ngram_size - 1) * c.engram_n_heads
        table = (rows, c.engram_head_dim)
        yield Tensor(f"{layer.name}.engram.embed.weight", table, "table", "Engram tables", "Engram")
        yield tensor("engram.wkv.weight", "fp8", "Engram", (c.hc_mult + 1) * dim, width * c.engram_head_dim)
        yield tensor("engram.q_weight", "bf16", "Engram", c.hc_mult, dim)
        yield tensor("engram.k_weight", "bf16", "Engram", c.hc_mult, dim)


def _experts(layer: LayerRole) -> Iterator[tuple[str, Format, str]]:
    yield "shared_experts", "fp8", "shared expert"
    for expert in range(layer.num_experts):
        yield f"experts.{expert}", "fp4", "routed experts"


def _draft_ends(c: ModelConfig) -> Iterator[Tensor]:
    """What the first and the last draft stage have beside a layer's tensors."""
    if not c.draft_stages:
        return
    dim, rank, last = c.hidden_size, c.dspark_markov_rank, c.draft_stages[-1].name
    taps = len(c.dspark_target_layer_ids)
    yield Tensor("mtp.0.main_proj.weight", (dim, taps * dim), "fp8", "drafts", "taps")
    yield Tensor("mtp.0.main_norm.weight", (dim,), "bf16", "drafts", "norms")
    yield Tensor(f"{last}.norm.weight", (dim,), "bf16", "drafts", "norms")
    for name in ("embed", "head"):
        yield Tensor(f"{last}.markov_head.{name}.weight", (c.vocab_size, rank), "bf16", "drafts", "Markov head")
    yield Tensor(f"{last}.confidence_head.proj.weight", (1, dim + rank), "bf16", "drafts", "confidence")


def _vision(c: ModelConfig) -> Iterator[Tensor]:
    v = c.vision
    if v is None:
        return

    def tensor(name: str, role: str, *shape: int) -> Tensor:
        return Tensor(name, shape, "bf16", "vision", role)

    def linear(name: str, role: str, n: int, k: int) -> Iterator[Tensor]:
        yield tensor(f"{name}.weight", role, n, k)
        yield tensor(f"{name}.bias", role, n)

    size, cell = v.hidden_size, v.downsample_ratio**2 * v.hidden_size
    yield from linear("vision.patch_embed.proj", "image tower", size, 3 * v.patch_size**2)
    for number in range(v.num_hidden_layers):
        block = f"vision.blocks.{number}"
        yield tensor(f"{block}.norm1.weight", "norms", size)
        yield tensor(f"{block}.norm2.weight", "norms", size)
        yield from linear(f"{block}.attn.wqkv", "image tower", 3 * size, size)
        yield from linear(f"{block}.attn.wo", "image tower", size, size)
        yield tensor(f"{block}.mlp.w1.weight", "image tower", 2 * v.intermediate_size, size)
        yield tensor(f"{block}.mlp.w2.weight", "image tower", size, v.intermediate_size)
    yield tensor("vision.norm.weight", "norms", size)
    yield from linear("aligner.w1", "aligner", c.hidden_size, cell)
    yield from linear("aligner.w2", "aligner", c.hidden_size, c.hidden_size)
    for which in ("start", "end", "newline"):
        yield tensor(f"image_{which}", "delimiters", c.hidden_size)
