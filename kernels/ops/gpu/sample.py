"""Sampling in one pass over the logits, and the cut of top-p (see `kernels/ops/sample.py` for what is promised)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.sample import MIN_TEMPERATURE, token_key

_BLOCK = 1024


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """The next token of each row, int64 `[rows]`. Raises ValueError when a row of logits holds a NaN."""
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    logits = logits.contiguous()
    floor = torch.where(temperature > 0, temperature.clamp(min=MIN_TEMPERATURE), 0.0)
    cut_value = torch.full((rows,), -torch.inf, device=logits.device)
    cut_token = torch.full((rows,), vocab_size, dtype=torch.int64, device=logits.device)
    nucleus = ((floor > 0) & (top_p < 1)).nonzero().flatten()
    if len(nucleus):
        cut_value[nucleus], cut_token[nucleus] = _cut(logits[nucleus] / floor[nucleus, None], top_p[nucleus])
    sample_kernel[rows,](
        logits,
        floor,
        cut_value,
        cut_token,
        token_key(seed, position),
        tokens,
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    if bool((tokens >= vocab_size).any()):
        raise ValueError("logits hold a NaN")
    return tokens


def _cut(scaled: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least likely token that stays, of each row: its value and its id.

    Sorting is torch's, stable; the sums are ours, because those of torch may be ordered by the number of rows.
    """
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rows, vocab_size = scaled.shape
    num_kept = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    count_top_p_kernel[rows,](
        ordered,
        top_p.contiguous(),
        num_kept,
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    last = (num_kept - 1).unsqueeze(1)
    return ordered.gather(1, last).squeeze(1), ids.gather(1, last).squeeze(1)


@triton.jit
def count_top_p_kernel(p_ordered, p_top_p, p_count, vocab_size, BLOCK: tl.constexpr):
    """How many of the likeliest tokens come before the sum of probabilities, in FP64, reaches top-p."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(p_ordered + row * vocab_size).to(tl.float64)
    total = tl.zeros([1], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(p_ordered + row * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        total += tl.sum(tl.exp(x.to(tl.float64) - top), 0)
    top_p = tl.load(p_top_p + row).to(tl.float64)
    count = tl.zeros([1], tl.int64)
    before = tl.zeros([1], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(p_ordered + row * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        probability = tl.exp(x.to(tl.float64) - top) / total
        reached = before + (tl.cumsum(probability, 0) - probability)
        count += tl.sum(((reached < top_p) & (token < vocab_size)).to(tl.int64), 0)
        before += tl.sum(probability, 0)
    tl.store(p_count + row + tl.arange(0, 1), tl.maximum(count, 1))


@triton.jit
def scrambled(x):
    """SplitMix64's finaliser of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def sample_kernel(
    p_logits, p_temperature, p_cut_value, p_cut_token, p_key, p_token, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: the lowest token of the greatest score; `vocab_size` if a logit is NaN."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_temperature + row)
    cut_value = tl.load(p_cut_value + row)
    cut_token = tl.load(p_cut_token + row)
    key = tl.load(p_key + row).to(tl.uint64, bitcast=True)
    best = tl.full([1], -float("inf"), tl.float32)
    best_token = tl.full([1], -1, tl.int64)
    num_bad = tl.zeros([1], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK).to(tl.int64)
        scores = tl.load(p_logits + row * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        num_bad += tl.sum((scores != scores).to(tl.int32), 0)
        if temperature > 0:
            scores = tl.div_rn(scores, temperature + tl.zeros_like(scores))
            stays = (scores > cut_value) | ((scores == cut_value) & (token <= cut_token))
            bits = scrambled(key + (token + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15) >> 12
            uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
            noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
            scores = tl.where(stays, scores + noise, -float("inf"))
        top = tl.max(scores, 0)
        first = tl.min(tl.where(scores == top, token, vocab_size), 0)
        better = (top > best) | (best_token < 0)
        best_token = tl.where(better, first, best_token)
        best = tl.where(better, top, best)
    tl.store(p_token + row + tl.arange(0, 1), tl.where(num_bad > 0, vocab_size, best_token))
