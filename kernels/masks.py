"""What may be sampled, and how readily: the logits of tokens that may not are set to -inf, those of others moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.constraint import Bits
from kernels.engine import Sampling

NOTHING = -torch.inf


class Rows(NamedTuple):
    """The rows of logits of one request: `num` of them, the first for the token at `position`.

    `allowed` are the bits of its constraint, one row each, None without one. Before its `first_end` the end-of-sequence
    token is not allowed, but where a constraint allows nothing else: it knows best when there is nothing more to say.
    """

    num: int
    position: int
    sampling: Sampling
    allowed: Bits | None


@torch.inference_mode()  # what it changes was made so
def mask_(logits: torch.Tensor, requests: Sequence[Rows], end_token: int, never: int | None) -> None:
    """In place: `logits` [rows, vocab] fp32 hold the rows of `requests`, in their order. No row may have `never`."""
    if never is not None:
        logits[:, never] = NOTHING
    begin = 0
    for rows in requests:
        own, sampling = logits[begin : begin + rows.num], rows.sampling
        if sampling.logit_bias:
            tokens, added = zip(*sampling.logit_bias, strict=True)
            own[:, list(tokens)] += torch.tensor(added, dtype=logits.dtype, device=logits.device)
        num_early = min(max(sampling.first_end - rows.position, 0), rows.num)
        if rows.allowed is not None:
            allowed = rows.allowed.copy()
            if num_early:
                allowed[:num_early] = _without_end(allowed[:num_early], end_token)
            own.masked_fill_(~unpack(torch.from_numpy(allowed).to(logits.device), logits.shape[1]), NOTHING)
        elif num_early:
            own[:num_early, end_token] = NOTHING
        if sampling.temperature > 0:
            _keep_likely(own, sampling)
        begin += rows.num


def _keep_likely(own: torch.Tensor, sampling: Sampling) -> None:
    """Leave the `top_k` likeliest tokens, all that are equally likely as the last of them, and of these the ones that
    are at least `min_p` times as likely as the likeliest: both can be told from the logits."""
    if 0 < sampling.top_k < own.shape[1]:
        last = own.topk(sampling.top_k, 1).values[:, -1:]
        own.masked_fill_(own < last, NOTHING)
    if sampling.min_p > 0:
        least = own.amax(1, keepdim=True) + sampling.temperature * math.log(sampling.min_p)
        own.masked_fill_(own < least, NOTHING)


def unpack(bits: torch.Tensor, num: int) -> torch.Tensor:
    """bool [rows, num] of int32 [rows, words]: the first `num` bits of each row, the lowest of a word first."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (((bits.unsqueeze(2) >> shifts) & 1) != 0).flatten(1)[:, :num]


def _without_end(allowed: Bits, end_token: int) -> Bits:
    """A copy in which that token is allowed only where nothing else is."""
    word, bit = end_token // 32, np.array(1 << (end_token % 32), dtype=np.uint32).view(np.int32)
    others = allowed.copy()
    others[:, word] &= ~bit
    return np.where(others.any(1, keepdims=True), others, allowed)
