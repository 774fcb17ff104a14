"""Counted cost of a prefill: floating-point operations of all products, from the configuration alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.config import LayerRole, ModelConfig

_Positions = npt.NDArray[np.int64]


def prefill_flops(config: ModelConfig, num_tokens: int, *, replay: bool) -> int:
    """Operations (two per multiply-add) that a prompt of `num_tokens` needs, its last row's logits included.

    What the model asks for, not what an implementation spends on padding; element-wise work, which is small, is left
    out. With `replay` decoder layers see the last window only (spec §5).
    """
    every = np.arange(num_tokens)
    last = every[-config.sliding_window :] if replay else every
    total = config.hidden_size * config.vocab_size
    for role in config.layers:
        enters = role.layer == config.first_decoder_layer
        rows = every if role.layer < config.first_decoder_layer else last
        total += len(every if enters else rows) * _entry(config, role) + len(rows) * _row(config, role)
        total += _attention(config, role, rows)
        if role.engram is not None:
            total += len(every if enters else rows) * _memory(config) * (config.hc_mult + 1) * config.hidden_size
    return 2 * total


def decode_weights(config: ModelConfig, num_rows: int) -> int:
    """Weights that a decode step of `num_rows` rows reads, each once: of the experts no more than the rows can pick.

    Rows that are looked up (embedding, Engram) are left out.
    """
    c = config
    num_experts = min(c.n_routed_experts, num_rows * c.num_experts_per_tok) + 1
    total = c.hidden_size * c.vocab_size
    for role in c.layers:
        queries, columns = _queries(c, role), _columns(c, role)
        total += columns * c.hidden_size + (c.head_dim * c.index_head_dim if role.owns_kv else 0)
        total += queries + (num_experts * 3 * c.moe_intermediate_size + c.n_routed_experts) * c.hidden_size
        total += 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * c.hidden_size
        if role.engram is not None:
            total += _memory(c) * (c.hc_mult + 1) * c.hidden_size
    return total


def _memory(config: ModelConfig) -> int:
    """Values of what Engram looks up for one token."""
    return (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim


def _columns(config: ModelConfig, role: LayerRole) -> int:
    """Outputs of what attention projects from its input."""
    columns = config.q_lora_rank + config.head_dim + (config.index_n_heads if role.owns_index else 0)
    return columns + (role.ratio * config.head_dim if role.owns_kv else 0)


def _queries(config: ModelConfig, role: LayerRole) -> int:
    """Weights of attention's projections of queries and output."""
    c, heads_dim = config, config.num_attention_heads * config.head_dim
    queries = heads_dim + (c.index_n_heads * c.index_head_dim if role.owns_index else 0)
    return c.q_lora_rank * queries + heads_dim * c.o_lora_rank + c.o_groups * c.o_lora_rank * c.hidden_size


def _entry(config: ModelConfig, role: LayerRole) -> int:
    """Multiply-adds per row of what attention projects from its input, the compressor with its index key included."""
    total = (config.hc_mult + _columns(config, role)) * config.hidden_size
    return total + (config.head_dim * config.index_head_dim // role.ratio if role.owns_kv else 0)


def _row(config: ModelConfig, role: LayerRole) -> int:
    """Multiply-adds per row of the rest of a layer, without its attention proper."""
    c = config
    experts = (c.num_experts_per_tok + 1) * 3 * c.moe_intermediate_size + c.n_routed_experts
    mixes = 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult + 2 * c.hc_mult * c.hc_mult + c.hc_mult
    return _queries(c, role) + (experts + mixes) * c.hidden_size


def _attention(config: ModelConfig, role: LayerRole, rows: _Positions) -> int:
    """Multiply-adds of scores and weighted sums, and of the indexer's scores, over all rows."""
    keys = np.minimum(rows - rows[0] + 1, config.sliding_window)
    scored = 0
    if role.ratio:
        visible = (rows + 1) // role.ratio
        keys = keys + np.minimum(visible, config.index_topk)
        if role.mode == "reindex":
            visible = np.minimum(visible, config.candidate_topk_blocks * config.candidate_block_size)
        if role.owns_index:
            scored = int(visible.sum()) * config.index_n_heads * config.index_head_dim
    return int(keys.sum()) * 2 * config.num_attention_heads * config.head_dim + scored
