"""The weights of shoal-tiny: every tensor of the official layout, at toy sizes, drawn from a seed.

The spreads follow spec §11.2 ("its init"), which keeps activations as healthy as a trained model's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from kernels.config import ModelConfig
from kernels.ops.engram import hash_tables
from run.tokenizer import BOS, CONTROL, EOS, IMAGE, PAD, SYSTEM

Array = npt.NDArray[np.float64]

# The end-of-sequence row of the head is this much longer than others, so that answers end after some hundred tokens.
# The rows of other control tokens are zero: a model that knows nothing should not open a tool call by chance.
_EOS_GAIN = 1.4


def tiny_config(tokenizer: Tokenizer, compressed_vocab_size: int) -> dict[str, Any]:
    """config.json: two window layers, two of ratio 2, four of ratio 1 with candidates and a second index owner."""
    layers, max_ngram, num_heads, bucket = [1, 2], 4, 2, 512
    tables = hash_tables(tuple(layers), max_ngram, num_heads, bucket, compressed_vocab_size)
    token = {name: tokenizer.token_to_id(name) for name in (BOS, EOS, PAD, IMAGE, SYSTEM)}
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0,
        "initializer_range": 0.02,
        "use_cache": True,
        "max_position_embeddings": 8192,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 512,
        },
        "compress_rope_theta": 160000,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": layers,
        "engram_num_embeddings": [table.num_rows for table in tables],
        "engram_max_ngram_size": max_ngram,
        "engram_vocab_size": bucket,
        "engram_n_heads": num_heads,
        "engram_head_dim": 32,
        "engram_pad_token_id": token[PAD],
        "engram_compressed_vocab_size": compressed_vocab_size,
        "num_nextn_predict_layers": 0,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": token[BOS],
        "eos_token_id": token[EOS],
        "pad_token_id": token[PAD],
        "image_token_id": token[IMAGE],
        "text_config": text,
    }


def tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """All tensors of spec §1.3 for a text-only model without draft blocks, linear weights in BF16."""
    draw = _Draw(seed)
    model = ModelConfig.from_keys(config)
    made = dict(_outer(model, model.vocab_size - len(CONTROL), draw))
    for layer in range(model.num_hidden_layers):
        made |= _layer(model, layer, draw)
    return made


class _Draw:
    """Nearly normal numbers that are the same on every platform and in any order: one stream per seed and name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, *shape: int) -> Array:
        """Mean 0, variance 1: the scaled sum of four uniform 16-bit integers."""
        raw = np.random.PCG64([self._seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
        sums = np.asarray(raw, dtype="<u8").view("<u2").reshape(-1, 4).sum(-1, dtype=np.int64)
        scaled: Array = (sums / 65536 - 2) * 3**0.5
        return scaled.reshape(shape)

    def bf16(self, name: str, *shape: int, std: float) -> torch.Tensor:
        return torch.from_numpy(self.normal(name, *shape) * std).to(torch.bfloat16)

    def fp32(self, name: str, *shape: int, std: float, mean: Array | float = 0.0) -> torch.Tensor:
        return torch.from_numpy(mean + self.normal(name, *shape) * std).float()

    def norm(self, name: str, dim: int, mean: float) -> torch.Tensor:
        """A norm weight: `mean`, give or take ten percent."""
        return torch.from_numpy(mean * (1 + 0.1 * self.normal(name, dim))).to(torch.bfloat16)

    def linear(self, name: str, out_dim: int, in_dim: int, gain: float) -> torch.Tensor:
        return self.bf16(name, out_dim, in_dim, std=gain * in_dim**-0.5)


def _outer(config: ModelConfig, first_control: int, draw: _Draw) -> Iterator[tuple[str, torch.Tensor]]:
    size, dim = config.vocab_size, config.hidden_size
    yield "embed.weight", draw.bf16("embed.weight", size, dim, std=0.12)
    yield "norm.weight", draw.norm("norm.weight", dim, 1.0)
    head = draw.normal("head.weight", size, dim) * 0.3
    head[config.eos_token_id] *= _EOS_GAIN
    head[[config.bos_token_id, config.pad_token_id]] = 0
    head[first_control:] = 0
    yield "head.weight", torch.from_numpy(head).to(torch.bfloat16)


def _layer(config: ModelConfig, layer: int, draw: _Draw) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}

    def add(kind: str, tensor: torch.Tensor) -> None:
        made[f"layers.{layer}.{kind}"] = tensor

    def linear(kind: str, out_dim: int, in_dim: int, gain: float) -> None:
        add(f"{kind}.weight", draw.linear(f"layers.{layer}.{kind}.weight", out_dim, in_dim, gain))

    def norm(kind: str, dim: int, mean: float) -> None:
        add(f"{kind}.weight", draw.norm(f"layers.{layer}.{kind}.weight", dim, mean))

    def vector(kind: str, *shape: int, std: float, mean: Array | float = 0.0) -> None:
        add(kind, draw.fp32(f"layers.{layer}.{kind}", *shape, std=std, mean=mean))

    role = config.layers[layer]
    dim, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    norm("attn_norm", dim, 0.025)
    norm("ffn_norm", dim, 0.2)
    linear("attn.wq_a", config.q_lora_rank, dim, 1.6)
    norm("attn.q_norm", config.q_lora_rank, 0.97)
    linear("attn.wq_b", config.num_attention_heads * head_dim, config.q_lora_rank, 0.95)
    linear("attn.wkv", head_dim, dim, 1.8)
    norm("attn.kv_norm", head_dim, 0.4)
    group_dim = config.num_attention_heads * head_dim // config.o_groups
    linear("attn.wo_a", config.o_groups * config.o_lora_rank, group_dim, 1.6)
    linear("attn.wo_b", dim, config.o_groups * config.o_lora_rank, 0.5)
    vector("attn.attn_sink", config.num_attention_heads, std=0.5)
    if role.owns_kv:
        linear("attn.compressor.wkv", head_dim, dim, 1.8)
        norm("attn.compressor.norm", head_dim, 0.6)
        if role.ratio == 2:
            linear("attn.compressor.wgate", head_dim, dim, 1.0)
        linear("attn.indexer.wk", index_dim, head_dim, 1.0)
        norm("attn.indexer.k_norm", index_dim, 0.5)
    if role.owns_index:
        linear("attn.indexer.wq_b", config.index_n_heads * index_dim, config.q_lora_rank, 1.0)
        linear("attn.indexer.weights_proj", config.index_n_heads, dim, 1.0)
    streams = config.hc_mult
    num_coefficients = (2 + streams) * streams
    # Streams mostly keep to themselves: the diagonal of the mixing matrix starts out stronger.
    base = np.concatenate([np.zeros(2 * streams), 1.5 * np.eye(streams).reshape(-1)])
    for part in ("attn", "ffn"):
        vector(f"hc_{part}_fn", num_coefficients, streams * dim, std=(streams * dim) ** -0.5)
        vector(f"hc_{part}_base", num_coefficients, std=0.5, mean=base)
        vector(f"hc_{part}_scale", 3, std=0.1, mean=0.5)
    linear("ffn.gate", config.n_routed_experts, dim, 2.9)
    vector("ffn.gate.bias", config.n_routed_experts, std=0.05)
    vector("ffn.gate.bias_vl", config.n_routed_experts, std=0.05)
    inter = config.moe_intermediate_size
    for expert in [*(f"ffn.experts.{number}" for number in range(config.n_routed_experts)), "ffn.shared_experts"]:
        linear(f"{expert}.w1", inter, dim, 1.5)
        linear(f"{expert}.w2", dim, inter, 1.05)
        linear(f"{expert}.w3", inter, dim, 1.5)
    if role.engram is not None:
        made |= _engram(config, layer, role.engram, draw)
    return made


def _engram(config: ModelConfig, layer: int, position: int, draw: _Draw) -> dict[str, torch.Tensor]:
    """Table rows in FP8 with one E8M0 scale per row and 32 columns, and their projection."""
    prefix = f"layers.{layer}.engram"
    streams, dim, row_dim = config.hc_mult, config.hidden_size, config.engram_head_dim
    num_rows = config.engram_num_embeddings[position]
    # Rows at a spread of 2 in FP8, times 2**-5: about a sixteenth, half of the token embedding's.
    rows = torch.from_numpy(2 * draw.normal(f"{prefix}.embed.weight", num_rows, row_dim)).to(torch.float8_e4m3fn)
    exponents = torch.full((num_rows, row_dim // 32), 127 - 3, dtype=torch.uint8)
    width = (config.engram_max_ngram_size - 1) * config.engram_n_heads * row_dim
    return {
        f"{prefix}.embed.weight": rows,
        f"{prefix}.embed.scale": exponents.view(torch.float8_e8m0fnu),
        f"{prefix}.wkv.weight": draw.linear(f"{prefix}.wkv.weight", (streams + 1) * dim, width, 1.8),
        f"{prefix}.q_weight": draw.norm(f"{prefix}.q_weight", streams * dim, 1.0).reshape(streams, dim),
        f"{prefix}.k_weight": draw.norm(f"{prefix}.k_weight", streams * dim, 1.0).reshape(streams, dim),
    }
