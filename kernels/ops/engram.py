"""Engram: hashed n-gram rows and their gated addition to the residual (spec §7)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from kernels.ops.dispatch import by_device
from kernels.ops.quant import dequantize_rows
from kernels.ops.rounding import Rounding, inverse_rms, sigmoid


class HashTables(NamedTuple):
    """Per Engram layer: `multipliers` [n], `primes` [(n - 1) * heads] and row `offsets` [(n - 1) * heads], int64."""

    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor

    @property
    def num_rows(self) -> int:
        return int(self.primes.sum())


def hash_tables(
    layers: tuple[int, ...], max_ngram: int, num_heads: int, vocab_size: int, compressed_size: int
) -> tuple[HashTables, ...]:
    """The constants of every Engram layer; they depend on the configuration only (spec §7.2)."""
    bound = max(1, ((2**63 - 1) // compressed_size) // 2)
    used: set[int] = set()
    tables = []
    for layer in layers:
        primes: list[int] = []
        for _ in range(max_ngram - 1):
            candidate = vocab_size - 1
            for _ in range(num_heads):
                candidate = _next_prime(candidate + 1, used)
                used.add(candidate)
                primes.append(candidate)
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
        prime_row = torch.tensor(primes)
        tables.append(HashTables(torch.from_numpy(2 * drawn + 1), prime_row, prime_row.cumsum(0) - prime_row))
    return tuple(tables)


def _next_prime(start: int, used: set[int]) -> int:
    while start in used or not _is_prime(start):
        start += 1
    return start


@cache
def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    divisors = np.arange(3, int(number**0.5) + 1, 2)
    return number % 2 != 0 and bool((number % divisors != 0).all())


def table_rows(history: torch.Tensor, pad: int, tables: HashTables) -> torch.Tensor:
    """Table rows [tokens, (n - 1) * heads] of compressed ids `history` [tokens, n], newest first.

    Entries below zero (before the start, or an image token) and all older ones count as `pad`.
    """
    alive = (history >= 0).to(torch.int64).cumprod(1) > 0
    terms = torch.where(alive, history, pad) * tables.multipliers
    hashes = [terms[:, 0]]
    for shift in range(1, terms.shape[1]):
        hashes.append(hashes[-1] ^ terms[:, shift])
    ngrams = torch.stack(hashes[1:], 1).repeat_interleave(tables.primes.numel() // (terms.shape[1] - 1), 1)
    return ngrams % tables.primes + tables.offsets


@by_device
def look_up(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Table rows, E4M3 `codes` [tokens, n, dim] with E8M0 `scale` [tokens, n, dim / 32], as values: [tokens, n dim]."""
    return dequantize_rows(codes, scale).flatten(1)


@by_device
def add_gated(
    streams: torch.Tensor, projected: torch.Tensor, qk_weight: torch.Tensor, alive: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """`streams` [rows, C, dim] plus the gated value; rounded.

    `projected` [rows, (C + 1) dim] holds C keys and the value, `qk_weight` [C, dim] the product of both norm weights,
    `alive` [rows, 1] is 0 for image tokens.
    """
    num, dim = streams.shape[1:]
    parts = projected.view(-1, num + 1, dim)
    keys, value = parts[:, :num], parts[:, num:]

    dot = (streams * qk_weight).mul_(keys).sum(-1)
    scale = torch.from_numpy(inverse_rms(streams.numpy(), 1e-20) * inverse_rms(keys.numpy(), 1e-20))
    dot = dot.mul_(scale).mul_(dim**-0.5)
    gate = sigmoid(dot.sign() * dot.abs().clamp_(min=1e-6).sqrt_()).mul_(alive)
    return rounding(streams + gate.unsqueeze(2) * value)
