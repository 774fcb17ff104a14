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
from kernels.storage import encode
from kernels.tensors import Tensor, model_tensors
from run.tokenizer import BOS, CONTROL, EOS, IMAGE, NOISE, PAD

Array = npt.NDArray[np.float64]

# The end-of-sequence row of the head is this much as long as others: answers mostly run to their limit, so that tests
# have time to interrupt them. The rows of other control tokens are zero: a model that knows nothing should not open a
# tool call by chance.
_EOS_GAIN = 0.8

# By the end of a name. Means of norm weights, give or take ten percent; standard deviations of what is no matrix;
# and of matrices, times the square root of their input width. wo_b is below the published spread, and the memory of
# Engram well above it, or the answers of an untrained model run in circles.
_NORM_MEANS = {"attn_norm": 0.025, "ffn_norm": 0.2, "q_norm": 0.97, "kv_norm": 0.4, "k_norm": 0.5}
_NORM_MEANS |= {"compressor.norm": 0.6}
_SPREADS = {"engram.embed": 0.25, "markov_head.embed": 1.0, "embed": 0.12, "head": 0.3, "sink": 0.5}
_SPREADS |= {"image_start": 0.12, "image_end": 0.12, "image_newline": 0.12}
_GAINS = {"wq_a": 1.6, "wq_b": 0.95, "wkv": 1.8, "wo_a": 1.6, "wo_b": 0.5, "gate": 2.9, "aligner.w2": 0.15}
_GAINS |= {"w1": 1.5, "w2": 1.05, "w3": 1.5, "markov_head.head": 0.6}

# Two window layers, two of ratio 2, four of ratio 1 with candidates and a second index owner, three draft stages.
_TEXT = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_intermediate_size": 64,
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
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 128,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}
_VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 128,
    "min_pixels": 84**2,
    "max_wh_ratio": None,
}


def tiny_config(tokenizer: Tokenizer, compressed_vocab_size: int) -> dict[str, Any]:
    """config.json, with ids and Engram tables that fit the tokenizer."""
    layers, max_ngram, num_heads, bucket = [1, 2], 4, 2, 2048
    tables = hash_tables(tuple(layers), max_ngram, num_heads, bucket, compressed_vocab_size)
    token = {name: tokenizer.token_to_id(name) for name in (BOS, EOS, PAD, IMAGE, NOISE)}
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "engram_layer_ids": layers,
        "engram_num_embeddings": [table.num_rows for table in tables],
        "engram_max_ngram_size": max_ngram,
        "engram_vocab_size": bucket,
        "engram_n_heads": num_heads,
        "engram_pad_token_id": token[PAD],
        "engram_compressed_vocab_size": compressed_vocab_size,
        "dspark_noise_token_id": token[NOISE],
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": token[BOS],
        "eos_token_id": token[EOS],
        "pad_token_id": token[PAD],
        "image_token_id": token[IMAGE],
        "quantization_config": _QUANTIZATION,
        "text_config": _TEXT | text,
        "vision_config": _VISION,
    }


def tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of spec §1.3, each in its published type: FP8 and FP4 with scales, BF16, FP32."""
    model, draw = ModelConfig.from_keys(config), _Draw(seed)
    for tensor in model_tensors(model):
        values = torch.from_numpy(_values(tensor, model, draw)).to(torch.float32)
        yield from encode(tensor.name, values, tensor.format).items()


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


def _values(tensor: Tensor, config: ModelConfig, draw: _Draw) -> Array:
    name = tensor.name.removesuffix(".weight")
    noise = draw.normal(tensor.name, *tensor.shape)
    if tensor.role == "norms" or name.endswith(("engram.q_weight", "engram.k_weight")):
        return _of(_NORM_MEANS, name, 1.0) * (1 + 0.1 * noise)
    if tensor.role == "stream mix":
        return _stream_mix(name, config.hc_mult, noise)
    if len(tensor.shape) == 1 or name in ("embed", "head") or name.endswith(("engram.embed", "markov_head.embed")):
        values = _of(_SPREADS, name, 0.05) * noise
    else:
        values = _of(_GAINS, name, 1.0) * tensor.shape[-1] ** -0.5 * noise
    if name.endswith("head") and tensor.shape[0] == config.vocab_size:
        values[config.eos_token_id] *= _EOS_GAIN
        values[[config.bos_token_id, config.pad_token_id]] = 0
        values[config.vocab_size - len(CONTROL) :] = 0
    return values


def _stream_mix(name: str, streams: int, noise: Array) -> Array:
    values: Array
    if name.endswith("fn"):
        values = noise.shape[1] ** -0.5 * noise
    elif name.endswith("scale"):
        values = 0.5 + 0.1 * noise
    else:  # streams mostly keep to themselves: the diagonal of the mixing matrix starts out stronger
        values = np.concatenate([np.zeros(2 * streams), 1.5 * np.eye(streams).reshape(-1)]) + 0.5 * noise
    return values


def _of(table: dict[str, float], name: str, otherwise: float) -> float:
    return next((value for ending, value in table.items() if name.endswith(ending)), otherwise)
