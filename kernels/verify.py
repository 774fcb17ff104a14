"""Verification of drafts: the tokens that the target samples, as far as they were foreseen (design: shared noise).

Draft and target draw with the same noise at a position, so a draft is right when it is the token that the target
samples there. What comes out is what decoding one by one gives, token for token, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.engine import Sampling
from kernels.ops.sample import sample


def sample_rows(logits: torch.Tensor, samplings: Sequence[Sampling], positions: torch.Tensor) -> torch.Tensor:
    """The next token of each row, int64 `[rows]`: `logits` [rows, vocab] fp32, one sampling and position a row."""
    device = logits.device
    return sample(
        logits,
        torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float32, device=device),
        torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float32, device=device),
        torch.tensor([sampling.seed for sampling in samplings], dtype=torch.int64, device=device),
        positions.to(device),
    )


def verify(
    logits: torch.Tensor, drafts: Sequence[Sequence[int]], starts: Sequence[int], samplings: Sequence[Sampling]
) -> list[list[int]]:
    """The new tokens of each request, one to 1 + its number of drafts.

    logits: fp32 [rows, vocab] of a forward pass over, per request, the token at position `starts` and its drafts
    behind it. A request that gets n tokens keeps n computed ones of the pass: truncate its slot to its start plus n.
    The last new token is not computed yet.
    """
    counts = [1 + len(drafted) for drafted in drafts]
    if sum(counts) != len(logits):
        raise ValueError(f"{sum(counts)} tokens to verify, {len(logits)} rows of logits")
    positions = [start + 1 + place for start, count in zip(starts, counts, strict=True) for place in range(count)]
    each = [sampling for sampling, count in zip(samplings, counts, strict=True) for _ in range(count)]
    sampled: list[int] = sample_rows(logits, each, torch.tensor(positions)).tolist()
    accepted, begin = [], 0
    for drafted, count in zip(drafts, counts, strict=True):
        target = sampled[begin : begin + count]
        right = next((place for place in range(count - 1) if drafted[place] != target[place]), count - 1)
        accepted.append(target[: right + 1])
        begin += count
    return accepted
