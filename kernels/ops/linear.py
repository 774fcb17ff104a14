"""The one matrix product that every projection goes through; a row's result never depends on the other rows.

GEMM libraries choose their blocking, and so their summation order, by shape. Here the shape is fixed: rows are cut
into tiles of ROW_TILE (short ones filled with zeros), each tile one item of a batched product. That is also the
definition of the result. Taller products are used only where a probe of that weight shape shows the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.ops.dispatch import by_device
from kernels.ops.quant import dequantize_blocks, fp8_qdq

ROW_TILE = 4  # below 4 rows MKL sums in another order (a matrix-vector routine); taller tiles only cost more
TALL = 64  # rows of one product where the probe allows it; beyond, nothing is gained
_PROBE_LIMIT = 1 << 25  # elements of the largest weight worth a probe


def padded_rows(num_rows: int) -> int:
    """`num_rows` rounded up to whole row tiles: inputs of that many rows are not copied by `linear`."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


@by_device
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[rows, k]` times `weight` `[n, k]` transposed, both fp32 and contiguous -> `[rows, n]` fp32.

    Bitwise the same per row whatever the number, order and content of other rows (design §5).
    """
    rows = x.shape[0]
    if rows % ROW_TILE:
        x = functional.pad(x, (0, 0, 0, padded_rows(rows) - rows))
    total = x.shape[0]
    if not tall_rows_agree(*weight.shape, torch.get_num_threads()):
        return _tiles(x, weight, ROW_TILE)[:rows]
    if total <= TALL:
        return functional.linear(x, weight)[:rows]
    tall = total // TALL * TALL
    if tall == total:
        return _tiles(x, weight, TALL)[:rows]
    return torch.cat((_tiles(x[:tall], weight, TALL), functional.linear(x[tall:], weight)))[:rows]


class Fp8Weight(NamedTuple):
    """A matrix as stored: E4M3 `codes` [n, k], E8M0 `scale` per 32 x 32 block [ceil(n / 32), k / 32]."""

    codes: torch.Tensor
    scale: torch.Tensor


@by_device
def fp8_linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """`x` [rows, k] fp32, quantised on the way, times the transposed `weight` -> [rows, n] fp32.

    Blocks of 32 of k are added in FP32 in their order, as published. Scales are powers of two, so applying them before
    a block's product or after it is the same.
    """
    quantized, values = fp8_qdq(x), dequantize_blocks(*weight)
    blocks = range(0, x.shape[1], 32)
    parts = [linear(quantized[:, k : k + 32].contiguous(), values[:, k : k + 32].contiguous()) for k in blocks]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [rows, groups, k] with a weight [groups, n, k] each -> [rows, groups * n]."""
    return torch.cat([linear(x[:, group].contiguous(), weight[group]) for group in range(weight.shape[0])], 1)


def enough_items(batch: torch.Tensor) -> torch.Tensor:
    """`batch` [items, ...] with items repeated until there are as many as threads; for batched products.

    With fewer, a library splits single items among the threads, and their summation order changes (measured with MKL:
    6 rows on 2 threads become 3 and 3).
    """
    items, num_threads = batch.shape[0], torch.get_num_threads()
    return batch if items >= num_threads else batch[torch.arange(num_threads) % items]


def _tiles(x: torch.Tensor, weight: torch.Tensor, tile: int) -> torch.Tensor:
    rows, k = x.shape
    n = weight.shape[0]
    tiles = enough_items(x.view(-1, tile, k))
    return torch.bmm(tiles, weight.t().expand(tiles.shape[0], k, n)).view(-1, n)[:rows]


@cache
def tall_rows_agree(n: int, k: int, num_threads: int) -> bool:
    """Whether products of up to TALL rows with a `[n, k]` weight have the bits of ROW_TILE-row ones here.

    The order of summation does not depend on the numbers, so random ones show a difference if there is any.
    Every row count that `linear` can use is tried. `num_threads` is a key because libraries choose by it.
    """
    if n * k > _PROBE_LIMIT:
        return False
    generator = torch.Generator().manual_seed(n * 1_000_003 + k)
    x = torch.randn(2 * TALL, k, generator=generator)
    weight = torch.randn(n, k, generator=generator)
    want = _tiles(x, weight, ROW_TILE)
    if not torch.equal(_tiles(x, weight, TALL), want) or not torch.equal(_tiles(x[:TALL], weight, TALL), want[:TALL]):
        return False
    counts = range(ROW_TILE, TALL + 1, ROW_TILE)
    return all(torch.equal(functional.linear(x[:rows], weight), want[:rows]) for rows in counts)
