"""Batches: conversations laid into rows of one length, with all that the model reads of them beside the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.config import ModelConfig
from kernels.vocabulary import TokenMap
from run.train.rendering import Sample
from run.train.sources import sources

ALIGN = 8
"""Conversations begin at multiples of this: pairs of tokens and blocks of candidates are then those of serving."""


@dataclass
class Batch:
    """Rows [B, T]. `positions` within a conversation; `lowest`, the column where it begins; `window_from`, the first
    column that its windows may see; `history` [B, T, n], compressed ids, newest first, -1 before the start and for
    images; `sources`, the column where the next token stands already, -1 where it does not (`sources.py`).

    The decoder computes the last `region` columns. `where` [n] are the flat places [B, region] whose next token is
    `wanted` [n], which an assistant must produce. `images`: pixels in the order of their tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lowest: torch.Tensor
    window_from: torch.Tensor
    history: torch.Tensor
    is_image: torch.Tensor
    sources: torch.Tensor
    region: int
    where: torch.Tensor
    wanted: torch.Tensor
    images: list[npt.NDArray[np.uint8]]


def pack(
    rows: Sequence[Sequence[Sample]],
    columns: int,
    region: int,
    token_map: TokenMap,
    cuts: Sequence[int | None],
    config: ModelConfig,
) -> Batch:
    """Lay `rows` of samples into `columns` each, the last sample at the end.

    `cuts`: per row a column before which its windows see nothing from there on, as after a hit without window rows.
    Raises ValueError for samples that do not fit.
    """
    image, num_ngram = config.image_token_id, config.engram_max_ngram_size
    assert image is not None
    shape = (len(rows), columns)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    lowest, goal = np.zeros(shape, np.int64), np.zeros(shape, bool)
    images: list[npt.NDArray[np.uint8]] = []
    source = np.full(shape, -1, np.int64)
    for row, samples in enumerate(rows):
        for sample, first in zip(samples, starts([len(one.tokens) for one in samples], columns), strict=True):
            end = first + len(sample.tokens)
            tokens[row, first:end], goal[row, first:end] = sample.tokens, sample.targets
            positions[row, first:end] = np.arange(end - first)
            lowest[row, first:] = first
            found = sources(sample.tokens, sample.targets)
            source[row, first:end] = np.where(found < 0, -1, found + first)
            images += [pixels for _, pixels in sample.images]
    window_from = lowest.copy()
    for row, cut in enumerate(cuts):
        if cut is not None:
            window_from[row, cut:] = np.maximum(window_from[row, cut:], cut)
    begin = columns - region
    ahead = np.zeros(shape, bool)
    ahead[:, :-1] = goal[:, 1:] & (positions[:, 1:] > 0)
    ahead[:, :begin] = False
    place = np.nonzero(ahead)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(positions),
        torch.from_numpy(lowest),
        torch.from_numpy(window_from),
        torch.from_numpy(_history(tokens, positions, token_map, image, num_ngram)),
        torch.from_numpy(tokens == image),
        torch.from_numpy(source),
        region,
        torch.from_numpy(place[0] * region + place[1] - begin),
        torch.from_numpy(tokens[place[0], place[1] + 1]),
        images,
    )


def starts(lengths: Sequence[int], columns: int) -> list[int]:
    """Where conversations of these lengths begin: as far to the right as ALIGN lets them. Raises ValueError."""
    found, end = [], columns
    for length in reversed(lengths):
        end = (end - length) // ALIGN * ALIGN
        found.append(end)
    if end < 0:
        raise ValueError(f"{sum(lengths)} tokens do not fit into {columns}")
    return found[::-1]


def _history(
    tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], token_map: TokenMap, image: int, num: int
) -> npt.NDArray[np.int64]:
    ids = np.where(tokens == image, -1, token_map.ids.numpy()[tokens])
    history = np.full((*tokens.shape, num), -1, np.int64)
    for shift in range(num):
        part = history[:, shift:, shift]
        part[:] = np.where(positions[:, shift:] >= shift, ids[:, : tokens.shape[1] - shift], -1)
    return history
