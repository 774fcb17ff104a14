"""The one matrix product that every projection goes through; a row's result never depends on the other rows.

GEMM libraries choose their blocking, and so their summation order, by shape. Here the shape is fixed: rows are cut
into tiles of ROW_TILE (short ones filled with zeros), each a product of its own. That is also the definition of the
result. Taller products are used where a probe of that weight shape shows the same bits.

Products are numpy's: for a few rows a call of it costs a quarter of one of torch's, and its OpenBLAS is twice as fast
as torch's MKL on some processors, equal on others.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.blas import use_one_thread
from kernels.ops.dispatch import by_device
from kernels.ops.quant import dequantize_blocks, fp8_qdq

ROW_TILE = 4  # a single row goes to a matrix-vector routine, with another order of summation
HEIGHTS = (*range(ROW_TILE, 65, ROW_TILE), 128, 256, 512)  # of products; each has to pass the probe

_PROBE_LIMIT = 1 << 25  # elements of the largest weight worth a probe

Array = npt.NDArray[np.float32]

use_one_thread()


def padded_rows(num_rows: int) -> int:
    """`num_rows` rounded up to whole row tiles: inputs of that many rows are not copied by `linear`."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    """A copy of `weight` [..., n, k] that lies column after column: `linear` on a CPU copies any other.

    On a GPU `weight` itself, whose kernel reads rows.
    """
    return weight if weight.is_cuda else weight.transpose(-1, -2).contiguous().transpose(-1, -2)


@by_device
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[rows, k]` times `weight` `[n, k]` transposed, both fp32 -> `[rows, n]` fp32; see `by_columns`.

    Bitwise the same per row whatever the number, order and content of other rows (design §5).
    """
    values, matrix = x.numpy(), weight.numpy()
    out = np.empty((len(values), len(matrix)), dtype=np.float32)
    multiply(values, matrix, out)
    return torch.from_numpy(out)


def multiply(x: Array, weight: Array, out: Array) -> None:
    """`linear` of `x` [rows, k] into `out` [rows, n]."""
    x, matrix = np.ascontiguousarray(x), np.ascontiguousarray(weight.T)  # another layout is another routine
    rows = len(x)
    num_missing = -rows % ROW_TILE
    if num_missing:
        x = np.concatenate((x, np.zeros((num_missing, x.shape[1]), dtype=np.float32)))
    whole = np.empty((len(x), len(weight)), dtype=np.float32) if num_missing else out
    for start, end in cuts(len(x), heights(*matrix.shape)):
        np.dot(x[start:end], matrix, whole[start:end])
    if num_missing:
        out[:] = whole[:rows]


def each_linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`linear` of every `x` [items, rows, k] and its own of `weights` [items, n, k] -> [items, rows, n] on a CPU."""
    rows, (n, k) = x.shape[1], weights.shape[1:]
    if rows in heights(k, n)[1:]:
        return torch.from_numpy(np.matmul(x.numpy(), weights.numpy().transpose(0, 2, 1)))
    return torch.stack([linear(*pair) for pair in zip(x, weights, strict=True)])


@cache
def cuts(num_rows: int, allowed: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The parts, from row to row, of `num_rows` (whole row tiles), each of an allowed height."""
    found, start = [], 0
    while start < num_rows:
        height = max(height for height in allowed if height <= num_rows - start)
        found.append((start, start + height))
        start += height
    return tuple(found)


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
    quantized, values = fp8_qdq(x), by_columns(dequantize_blocks(*weight))
    parts = [linear(quantized[:, k : k + 32], values[:, k : k + 32]) for k in range(0, x.shape[1], 32)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [rows, groups, k] with a weight [groups, n, k] each -> [rows, groups * n]."""
    return torch.cat([linear(x[:, group], weight[group]) for group in range(weight.shape[0])], 1)


@cache
def heights(k: int, n: int) -> tuple[int, ...]:
    """Heights of products with a `[k, n]` matrix that have the bits of products of ROW_TILE rows here.

    The order of summation does not depend on the numbers, so random ones show a difference if there is any.
    """
    if n * k > _PROBE_LIMIT:
        return (ROW_TILE,)
    rng = np.random.default_rng(n * 1_000_003 + k)
    x = rng.standard_normal((HEIGHTS[-1], k), dtype=np.float32)
    matrix = rng.standard_normal((k, n), dtype=np.float32)
    want = np.concatenate([np.dot(x[start : start + ROW_TILE], matrix) for start in range(0, len(x), ROW_TILE)])
    others = (
        height
        for height in HEIGHTS[1:]
        # Some kernels take a dozen rows at once, and not all in one order: hence every row at other places too.
        for places in [np.arange(height)]
        if all(np.array_equal(_product(x[p], matrix), want[p]) for p in (places, np.roll(places, 1), places[::-1]))
    )
    return (ROW_TILE, *others)


def _product(x: Array, matrix: Array) -> Array:
    """NaN where a batch of products has other bits than a single one."""
    found = np.dot(x, matrix)
    return np.where(found == np.matmul(x[None], matrix[None])[0], found, np.float32(np.nan))
