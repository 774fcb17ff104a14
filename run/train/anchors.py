"""Where blocks are drafted in a batch: behind columns from which on an assistant speaks."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from run.train.packing import Batch


class Anchors(NamedTuple):
    """A blocks of S drafts, each behind a column that the backbone has computed last.

    `place` [A] flat places of these columns in [B, region]; `positions` [A] of them; `tokens` [A, 1 + S], those that
    follow; `counted` [A, S], which drafts an answer still has a token for; `window` [A, W] flat places of the rows that
    the block sees, oldest first, and `seen` [A, W], which are there.
    """

    place: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    counted: torch.Tensor
    window: torch.Tensor
    seen: torch.Tensor


def choose(batch: Batch, size: int, window: int, most: int, draw: random.Random) -> Anchors:
    """At most `most` blocks of `size` drafts, drawn from all columns behind which at least one draft counts.

    What stands behind the end of an answer does not count. The token after an anchor is known when a block is drafted:
    it was sampled, and is not computed yet.
    """
    rows, columns = batch.tokens.shape
    region, begin = batch.region, columns - batch.region
    spoken = torch.zeros(rows, region + size, dtype=torch.bool)
    spoken[batch.where // region, batch.where % region] = True
    follows = torch.stack([spoken[:, shift : shift + region] for shift in range(size + 1)], -1)
    follows = follows.flatten(0, 1).cumprod(-1).bool()  # [B region, 1 + S]: all tokens up to there are the assistant's
    able = follows[:, 1].nonzero().squeeze(1).tolist()
    place = torch.tensor(sorted(draw.sample(able, min(most, len(able)))), dtype=torch.int64)
    row, column = place // region, place % region
    ahead = (begin + column).unsqueeze(1) + 1 + torch.arange(size + 1)
    behind = column.unsqueeze(1) + torch.arange(1 - window, 1)
    first = (batch.window_from[row, begin + column] - begin).clamp(min=0)
    return Anchors(
        place,
        batch.positions[row, begin + column],
        batch.tokens[row.unsqueeze(1), ahead.clamp(max=columns - 1)],
        follows[place, 1:],
        (row * region).unsqueeze(1) + behind.clamp(min=0),
        behind >= first.unsqueeze(1),
    )
