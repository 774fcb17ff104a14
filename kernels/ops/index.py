"""The sparse indexer's scores, picks and candidate blocks (spec §4.3, §4.4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kernels.ops.dispatch import by_device
from kernels.ops.linear import by_columns, each_linear, linear
from kernels.ops.pack import Record, unpack
from kernels.ops.rounding import Rounding

KEY_TILE = 128  # keys per product
_ROWS = 64  # rows per product

_LOW = 0xFFFFFFFF
_NONE = 1 << 30  # sorts behind every row number


class Cache(NamedTuple):
    """Index keys as INDEX records in `pages` [blocks, rows per block, row_bytes] uint8, of requests whose blocks are
    `tables` [requests, n] int64, whole tiles of KEY_TILE."""

    pages: torch.Tensor
    tables: torch.Tensor

    @property
    def num(self) -> int:
        """Keys of one request, those behind its end included."""
        return self.tables.shape[1] * self.pages.shape[1]


@by_device
def cached_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    visible: torch.Tensor,
    mask: torch.Tensor | None,
    rounding: Rounding,
) -> torch.Tensor:
    """Sum over heads of weight times relu(q . k) for every key of the request of a row: [rows, cache.num].

    `q` [rows, heads, dim], `weights` [rows, heads], all fp32; as many rows follow one another for each request. -inf
    from column `visible` [rows] on, and where the candidate `mask` [rows, cache.num] is false, if there is one. Queries
    and keys are quantised, so BF16 holds them exactly.
    """
    rows, (requests, blocks) = q.shape[0], cache.tables.shape
    per_tile = KEY_TILE // cache.pages.shape[1]
    values = torch.full((rows, cache.num), -torch.inf)
    last = int(visible.max())
    for number in range(blocks // per_tile):
        start = number * KEY_TILE
        if start >= last:
            break
        ids = cache.tables[:, number * per_tile : (number + 1) * per_tile]
        keys = unpack(cache.pages.index_select(0, ids.flatten()).flatten(0, 1), Record.INDEX)
        # In one request the first rows of a chunk do not reach the later tiles.
        skip = int((visible > start).to(torch.uint8).argmax()) if requests == 1 else 0
        keys = keys.view(requests, KEY_TILE, -1)
        values[skip:, start : start + KEY_TILE] = scores(q[skip:], weights[skip:], keys, rounding)
    hide(values, visible)
    return values if mask is None else values.masked_fill_(~mask, -torch.inf)


def scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """The same for one tile of keys of each request, all visible: `keys` [requests, KEY_TILE, dim] fp32 ->
    [rows, KEY_TILE]."""
    rows, heads, _ = q.shape
    each = rows // len(keys)
    found = torch.empty(rows, KEY_TILE)
    matrices = by_columns(keys)

    def add(some: slice, products: torch.Tensor) -> None:
        dots = rounding(products.view(-1, heads, KEY_TILE)).relu_()
        found[some] = rounding(rounding(dots.mul_(weights[some].unsqueeze(2))).sum(1))

    # As many rows at a time as leave their products in a cache: of many requests, or of one.
    step = max(_ROWS // each, 1)
    for first in range(0, len(keys), step):
        some = slice(first * each, (first + step) * each)
        if each <= _ROWS:
            add(some, each_linear(q[some].reshape(-1, each * heads, q.shape[2]), matrices[first : first + step]))
            continue
        for start in range(some.start, some.stop, _ROWS):
            part = slice(start, min(start + _ROWS, some.stop))
            add(part, linear(q[part].flatten(0, 1), matrices[first]))
    return found


def hide(values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Set `values` [rows, num] from column `visible` [rows] on to -inf, in place."""
    columns = torch.arange(values.shape[1], device=values.device)
    return values.masked_fill_(columns >= visible.unsqueeze(1), -torch.inf)


@by_device
def top_rows(values: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best columns of each row, ascending, -1 behind them; equal values: the lower column first.

    `values` [rows, num] fp32 with -inf where nothing may be picked, `visible` [rows] -> [rows, count] int64.
    A visible column of value -inf can be picked, after all others, as published: the last filter is visibility.
    """
    rows, num = values.shape
    found = best_columns(values, min(count, num)).numpy()
    picked = np.full((rows, count), _NONE)
    picked[:, : found.shape[1]] = np.where(found < visible.numpy()[:, None], found, _NONE)
    picked.sort(1)
    return torch.from_numpy(np.where(picked < _NONE, picked, -1))


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
    picked = best_columns(best, min(num_blocks, total))
    chosen = torch.zeros(rows, total, dtype=torch.bool, device=values.device).scatter_(1, picked, True)
    mask = chosen & (best > -torch.inf)
    return mask.repeat_interleave(block_size, 1)[:, :num]


@by_device
def best_columns(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` greatest of `values` [rows, num], in no order: [rows, count] int64.

    Ties go to the lower column, whatever the library does: value and column are packed into one integer whose order is
    that of (value, -column), so no two are equal.
    """
    num = values.shape[1]
    bits = (values.numpy() + np.float32(0.0)).view(np.int32)  # adding zero makes -0.0 equal to 0.0
    packed = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    packed <<= 32
    packed |= _LOW - np.arange(num)
    if num > 512:  # measured for the best 64: up to here numpy's selection is the quicker one, four times at 256
        return _LOW - (torch.from_numpy(packed).topk(count, -1, sorted=False).values & _LOW)
    packed.partition(num - count, axis=1)
    return torch.from_numpy(_LOW - (packed[:, num - count :] & _LOW))
