"""Tokens that may not be sampled: early ends, what a constraint leaves out, what no row may have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kernels.constraint import Bits
from kernels.engine import Sampling
from kernels.masks import Rows, mask_, unpack

END, VOCAB = 33, 70
FREE = Sampling(0.0, 1.0, 0)


def bits(*rows: list[int]) -> Bits:
    found = np.zeros((len(rows), 3), dtype=np.uint32)
    for row, tokens in enumerate(rows):
        for token in tokens:
            found[row, token // 32] |= np.uint32(1 << token % 32)
    return found.view(np.int32)


def allowed(logits: torch.Tensor) -> list[list[int]]:
    return [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]


def test_bits_are_unpacked_lowest_first_the_sign_bit_too() -> None:
    assert allowed(unpack(torch.from_numpy(bits([0, 31, 32, 63, 69])), VOCAB).log())[0] == [0, 31, 32, 63, 69]


def test_rows_of_each_request_have_their_own_masks() -> None:
    logits = torch.zeros(6, VOCAB)
    requests = [
        Rows(2, 10, FREE, bits([1, 31, 40], [2, END])),
        Rows(1, 10, FREE, None),
        Rows(3, 10, replace(FREE, first_end=12), None),
    ]
    mask_(logits, requests, END, never=40)
    everything = [token for token in range(VOCAB) if token != 40]
    no_end = [token for token in everything if token != END]
    assert allowed(logits) == [[1, 31], [2, END], everything, no_end, no_end, everything]


def test_a_bias_is_added_in_its_own_rows_and_allows_nothing() -> None:
    logits = torch.arange(3.0)[:, None].repeat(1, VOCAB)
    biased = replace(FREE, logit_bias=((2, -1.5), (4, 100.0)))
    mask_(logits, [Rows(2, 5, biased, bits([2, 3], [2, 3])), Rows(1, 5, FREE, None)], END, never=None)
    assert allowed(logits) == [[2, 3], [2, 3], list(range(VOCAB))]
    assert logits[:, [2, 3]].tolist() == [[-1.5, 0.0], [-0.5, 1.0], [2.0, 2.0]]


def test_only_likely_ones_are_left() -> None:
    """Of what is allowed; as by the probabilities that temperature gives."""
    row = torch.tensor([3.0, 1.0, 2.0, 2.0, -1.0, 0.0])
    warm = Sampling(0.5, 1.0, 0)
    cases = [
        (replace(warm, top_k=1), [0]),
        (replace(warm, top_k=2), [0, 2, 3]),  # equally likely
        (replace(warm, top_k=99), [0, 1, 2, 3, 4, 5]),
        (replace(warm, min_p=0.9), [0]),
        (replace(warm, min_p=0.13), [0, 2, 3]),
        (replace(warm, min_p=0.01), [0, 1, 2, 3]),
        (replace(warm, min_p=0.13, temperature=2.0), [0, 1, 2, 3, 4, 5]),
        (replace(warm, min_p=0.25, temperature=2.0), [0, 1, 2, 3]),
        (replace(warm, min_p=0.13, top_k=1, logit_bias=((4, 9.0),)), [4]),
        (replace(warm, temperature=0.0, min_p=0.9, top_k=1), [0, 1, 2, 3, 4, 5]),
    ]
    for sampling, left in cases:
        logits = torch.stack([row, row])
        mask_(logits, [Rows(1, 5, sampling, None), Rows(1, 5, FREE, None)], 5, never=None)
        assert allowed(logits) == [left, [0, 1, 2, 3, 4, 5]]
        if sampling.min_p and sampling.temperature and not sampling.top_k:
            probability = torch.softmax(row / sampling.temperature, 0)
            assert left == (probability >= sampling.min_p * probability.max()).nonzero().flatten().tolist()
    logits = row[None].clone()
    mask_(logits, [Rows(1, 5, replace(warm, top_k=1), None)], 5, never=0)
    assert allowed(logits) == [[2, 3]]


def test_an_end_comes_early_only_where_a_constraint_allows_nothing_else() -> None:
    logits = torch.zeros(3, VOCAB)
    before = bits([1, END], [END], [1, END])
    mask_(logits, [Rows(3, 5, replace(FREE, first_end=7), before)], END, never=None)
    assert allowed(logits) == [[1], [END], [1, END]]
    assert (before == bits([1, END], [END], [1, END])).all()
