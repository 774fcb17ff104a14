"""The sparse indexer's scores, picks and candidate blocks (spec §4.3, §4.4)."""

from __future__ import annotations

import torch

from kernels.ops.linear import enough_items
from kernels.ops.rounding import Rounding

KEY_TILE = 128  # keys per product; caches hold whole tiles
PICK_TILE = 64  # picks per key set of an attention product

_LOW = 0xFFFFFFFF
_NONE = 1 << 30  # sorts behind every row number


def scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Sum over heads of weight times relu(q . k), for one tile of keys.

    `q` [rows, heads, dim], `weights` [rows, heads], `keys` [rows, KEY_TILE, dim] -> [rows, KEY_TILE], all fp32.
    """
    products = torch.bmm(enough_items(q), enough_items(keys).transpose(1, 2))[: q.shape[0]]
    dots = rounding(products).relu_()
    return rounding(rounding(dots.mul_(weights.unsqueeze(2))).sum(1))


def hide(values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Set `values` [rows, num] from column `visible` [rows] on to -inf, in place."""
    columns = torch.arange(values.shape[1])
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
    columns = torch.arange(count)
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
    best = torch.where((visible > 0).unsqueeze(1) & (torch.arange(total) == newest.unsqueeze(1)), torch.inf, best)
    picked = _best(best, min(num_blocks, total))
    mask = torch.zeros(rows, total, dtype=torch.bool).scatter_(1, picked, True) & (best > -torch.inf)
    return mask.repeat_interleave(block_size, 1)[:, :num]


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` greatest values, in no order; ties go to the lower column, whatever the library does.

    Value and column are packed into one integer whose order is that of (value, -column): no two are equal.
    """
    bits = values.add(0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ordered.to(torch.int64) << 32) | (_LOW - torch.arange(values.shape[1]))
    return _LOW - (packed.topk(count, -1, sorted=False).values & _LOW)
