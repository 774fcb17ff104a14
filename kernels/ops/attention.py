"""Attention over explicit key sets with a sink in the denominator; keys are values too (spec §3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.ops.dispatch import by_device
from kernels.ops.linear import enough_items
from kernels.ops.pack import Record, gather
from kernels.ops.rope import Rotation, rotate_
from kernels.ops.rounding import Rounding

_LOWEST = -1e30  # where the running maximum starts, so that a query without any key gives zeros


class KeySet(NamedTuple):
    """`keys` [rows, num_keys, dim] fp32, and `bias` [rows, num_keys]: 0 for a key that is there, -inf for none."""

    keys: torch.Tensor
    bias: torch.Tensor


class Keys(NamedTuple):
    """Rows of a cache, and which of them a query sees: `named` [rows, num_keys] int64, -1 for none.

    `cache` is [all, dim] fp32 or bf16, or uint8 [all, row_bytes] when `record` says what its rows are.
    """

    cache: torch.Tensor
    named: torch.Tensor
    record: Record | None = None


@by_device
def attend(
    q: torch.Tensor, key_sets: Sequence[KeySet], sink: torch.Tensor, scale: float, rounding: Rounding
) -> torch.Tensor:
    """`q` [rows, heads, dim] fp32, `sink` [heads] -> [rows, heads, dim], rounded.

    Each key set is one product per row of a fixed shape, and sets are added in order, so a row's bits depend on its
    own key sets only. A set that is empty for a row adds exact zeros: leaving it out changes nothing.
    """
    rows = q.shape[0]
    q, key_sets = enough_items(q), [KeySet(enough_items(keys), enough_items(bias)) for keys, bias in key_sets]
    scores = [
        torch.baddbmm(bias.unsqueeze(1), q, keys.transpose(1, 2), alpha=scale) for keys, bias in key_sets
    ]  # [rows, heads, num_keys] each
    top = scores[0].amax(-1, keepdim=True)
    for other in scores[1:]:
        top = torch.maximum(top, other.amax(-1, keepdim=True))
    top.clamp_(min=_LOWEST)
    total = (sink[:, None] - top).exp_()
    out: torch.Tensor | None = None
    for score, (keys, _) in zip(scores, key_sets, strict=True):
        weights = score.sub_(top).exp_()
        total = total.add_(weights.sum(-1, keepdim=True)) if out is None else total + weights.sum(-1, keepdim=True)
        part = torch.bmm(rounding(weights), keys)
        out = part if out is None else out.add_(part)
    assert out is not None
    return rounding(out.div_(total))[:rows]


@by_device
def sparse_attend(
    q: torch.Tensor,
    window: Keys,
    picked: Keys,
    sink: torch.Tensor,
    scale: float,
    rotation: Rotation,
    rounding: Rounding,
) -> torch.Tensor:
    """`attend` over the rows of two caches that each query names, then the inverse rotation; rounded after both."""
    key_sets = [_gathered(keys, q.shape[-1]) for keys in (window, picked) if keys.named.shape[1]]
    return rounding(rotate_(attend(q, key_sets, sink, scale, rounding), rotation.inverse))


def _gathered(keys: Keys, dim: int) -> KeySet:
    flat = keys.named.reshape(-1)
    if keys.record is not None:
        values = gather(keys.cache, flat, keys.record)
    else:
        values = keys.cache[flat.clamp(min=0)].to(torch.float32)
    bias = torch.zeros(keys.named.shape).masked_fill_(keys.named < 0, -torch.inf)
    return KeySet(values.view(*keys.named.shape, dim), bias)
