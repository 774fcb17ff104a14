"""The sparse indexer's scores, picks and candidate blocks (spec §4.3, §4.4)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.ops.dispatch import by_device
from kernels.ops.linear import enough_items
from kernels.ops.pack import Record, gather
from kernels.ops.rounding import Rounding

KEY_TILE = 128  # keys per product; caches hold whole tiles
PICK_TILE = 64  # picks per key set of an attention product

_LOW = 0xFFFFFFFF
_NONE = 1 << 30  # sorts behind every row number


@by_device
def scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Sum over heads of weight times relu(q . k), for one tile of keys.

    `q` [rows, heads, dim], `weights` [rows, heads], `keys` [rows, KEY_TILE, dim] -> [rows, KEY_TILE], all fp32.
    """
    products = torch.bmm(enough_items(q), enough_items(keys).transpose(1, 2))[: q.shape[0]]
    dots = rounding(products).relu_()
    return rounding(rounding(dots.mul_(weights.unsqueeze(2))).sum(1))


class Cache(NamedTuple):
    """Index keys [slots, num, dim], or uint8 records [slots, num, row_bytes]; `slots` [rows] says whose a row reads."""

    keys: torch.Tensor
    slots: torch.Tensor
    record: Record | None = None


@by_device
def cached_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    visible: torch.Tensor,
    mask: torch.Tensor | None,
    num: int,
    rounding: Rounding,
) -> torch.Tensor:
    """`scores` of the first `num` keys, whole tiles of KEY_TILE: [rows, num].

    -inf from column `visible` [rows] on, and where the candidate `mask` [rows, num] is false, if there is one. Queries
    and keys are quantised, so BF16 holds them exactly.
    """
    rows, _, dim = q.shape
    values = torch.empty(rows, num)
    for start in range(0, num, KEY_TILE):
        tile = cache.keys[cache.slots, start : start + KEY_TILE]
        if cache.record is not None:
            keys = gather(tile.flatten(0, 1), torch.arange(rows * KEY_TILE), cache.record)
        else:
            keys = tile.to(torch.float32)
        columns = slice(start, start + KEY_TILE)
        values[:, columns] = scores(q, weights, keys.reshape(rows, KEY_TILE, dim), rounding)
    hide(values, visible)
    return values if mask is None else values.masked_fill_(~mask, -torch.inf)


def hide(values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Set `values` [rows, num] from column `visible` [rows] on to -inf, in place."""
    columns = torch.arange(values.shape[1], device=values.device)
    return values.masked_fill_(columns >= visible.unsqueeze(1), -torch.inf)


def top_rows(values: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best columns of each row, ascending, -1 behind them; equal values: the lower column first.

    `values` [rows, num] fp32 with -inf where nothing may be picked, `visible` [rows] -> [rows, count] int64.
    A visible column of value -inf can be picked, after all others, as published: the last filter is visibility.
    """
    picked = _best(values, min(count, values.shape[1]))
    picked = torch.where(picked < visible.unsqueeze(1), picked, _NONE).sort(-1).values
    if picked.shape[1] < count:
        picked = torch.nn.functional.pad(picked, (0, count - picked.shape[1]), value=_NONE)
    return torch.where(picked < _NONE, picked, -1)


def all_rows(visible: torch.Tensor, count: int) -> torch.Tensor:
    """What `top_rows` gives while no row sees more than `count` columns: all of them."""
    columns = torch.arange(count, device=visible.device)
    return torch.where(columns < visible.unsqueeze(1), columns, -1)


def candidate_mask(values: torch.Tensor, visible: torch.Tensor, block_size: int, num_blocks: int) -> torch.Tensor:
    """Which columns lie in the best `num_blocks` blocks of `block_size`: [rows, num] bool.

    A block counts by its best value; the block of the newest visible column always belongs, others of -inf never.
    """
    rows, num = values.shape
    total = -(-num // block_size)
    padded = torch.nn.functional.pad(values, (0, total * block_size - num), value=-torch.inf)
    best = padded.view(rows, total, block_size).amax(-1)
    newest = (visible - 1).clamp(min=0).div(block_size, rounding_mode="floor")
    holds_newest = torch.arange(total, device=values.device) == newest.unsqueeze(1)
    best = torch.where((visible > 0).unsqueeze(1) & holds_newest, torch.inf, best)
    picked = _best(best, min(num_blocks, total))
    chosen = torch.zeros(rows, total, dtype=torch.bool, device=values.device).scatter_(1, picked, True)
    mask = chosen & (best > -torch.inf)
    return mask.repeat_interleave(block_size, 1)[:, :num]


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` greatest values, in no order; ties go to the lower column, whatever the library does.

    Value and column are packed into one integer whose order is that of (value, -column): no two are equal.
    """
    bits = values.add(0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ordered.to(torch.int64) << 32) | (_LOW - torch.arange(values.shape[1], device=values.device))
    return _LOW - (packed.topk(count, -1, sorted=False).values & _LOW)
