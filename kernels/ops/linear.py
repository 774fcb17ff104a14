"""The one matrix product that every projection goes through; a row's result never depends on the other rows.

GEMM libraries choose their blocking, and so their summation order, by shape. Here the shape is always the same:
rows are cut into tiles of ROW_TILE, each tile is one batch item of one product, short tiles are filled with zeros.
Large inputs use WIDE_TILE rows an item, but only for weight shapes where a probe shows that this gives the same bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import pad

ROW_TILE = 8
WIDE_TILE = 64


def padded_rows(num_rows: int) -> int:
    """`num_rows` rounded up to whole row tiles: inputs of that many rows are not copied by `linear`."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[rows, k]` times `weight` `[n, k]` transposed, both fp32 and contiguous -> `[rows, n]` fp32.

    Bitwise the same per row whatever the number, order and content of other rows (design §5).
    """
    rows, k = x.shape
    n = weight.shape[0]
    if rows % ROW_TILE:
        x = pad(x, (0, 0, 0, padded_rows(rows) - rows))
    total = x.shape[0]
    wide = total // WIDE_TILE * WIDE_TILE
    if wide and not wide_rows_agree(n, k, torch.get_num_threads()):
        wide = 0
    if wide in (0, total):
        return _tiles(x, weight, WIDE_TILE if wide else ROW_TILE)[:rows]
    parts = (_tiles(x[:wide], weight, WIDE_TILE), _tiles(x[wide:], weight, ROW_TILE))
    return torch.cat(parts)[:rows]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [rows, groups, k] with a weight [groups, n, k] each -> [rows, groups * n]."""
    return torch.cat([linear(x[:, group].contiguous(), weight[group]) for group in range(len(weight))], 1)


def _tiles(x: torch.Tensor, weight: torch.Tensor, tile: int) -> torch.Tensor:
    rows, k = x.shape
    n = weight.shape[0]
    items = rows // tile
    return torch.bmm(x.view(items, tile, k), weight.t().expand(items, k, n)).view(rows, n)


@cache
def wide_rows_agree(n: int, k: int, num_threads: int) -> bool:
    """Whether WIDE_TILE-row products of a `[n, k]` weight have the bits of ROW_TILE-row ones on this machine.

    The order of summation does not depend on the numbers, so random ones show a difference if there is any.
    `num_threads` is only a key: libraries may choose by it.
    """
    generator = torch.Generator().manual_seed(n * 1_000_003 + k)
    x = torch.randn(WIDE_TILE, k, generator=generator)
    weight = torch.randn(n, k, generator=generator)
    return torch.equal(_tiles(x, weight, WIDE_TILE), _tiles(x, weight, ROW_TILE))
