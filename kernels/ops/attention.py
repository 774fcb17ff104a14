"""Attention over explicit key sets with a sink in the denominator; keys are values too (spec §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.dispatch import by_device
from kernels.ops.pack import Record, gather, unpack
from kernels.ops.rope import Rotation, rotate_
from kernels.ops.rounding import Rounding

PICK_TILE = 64  # picks per key set of a product
_ROWS = 128  # of one pass, about
_LOWEST = -1e30  # where the running maximum starts, so that a query without any key gives zeros


Array = npt.NDArray[np.float32]


class KeySet(NamedTuple):
    """`keys` [rows, num_keys, dim] fp32, and `bias` [rows, num_keys]: 0 for a key that is there, -inf for none.

    Keys of rows that follow one another in segments may be [segments, length, num_keys, dim], a view in which rows
    share memory: then nothing is copied for them.
    """

    keys: torch.Tensor
    bias: torch.Tensor


class Keys(NamedTuple):
    """Rows of a cache, and which of them a query sees: `named` [rows, num_keys] int64, -1 for none.

    `cache` is [all, dim] fp32 or bf16, or uint8 [all, row_bytes] when `record` says what its rows are.
    """

    cache: torch.Tensor
    named: torch.Tensor
    record: Record | None = None


@dataclass(frozen=True)
class Window:
    """What the rows of `num` equally long segments see of a run of rows: each segment's `size` - 1 rows before it, then
    its own. A row sees the `size` rows that end with its own, but not the first `hidden` [rows] int64 of them."""

    num: int
    size: int
    hidden: torch.Tensor

    @cached_property
    def bias(self) -> torch.Tensor:
        """[rows, size] fp32, -inf for what is hidden."""
        columns = torch.arange(self.size, device=self.hidden.device)
        return torch.where(columns < self.hidden.unsqueeze(1), -torch.inf, 0.0)

    @cached_property
    def named(self) -> torch.Tensor:
        """[rows, size] int64 rows of the flattened run, -1 for what is hidden."""
        rows, columns = (torch.arange(n, device=self.hidden.device) for n in (len(self.hidden), self.size))
        first = rows + rows // (len(rows) // self.num) * (self.size - 1)
        return torch.where(columns < self.hidden.unsqueeze(1), -1, first.unsqueeze(1) + columns)


Source = Keys | KeySet | Sequence[KeySet]


@by_device
def sliding(run: torch.Tensor, window: Window) -> Source:
    """The keys of each row in position order, its own last: `run` [num, size - 1 + length, ..] of `window_rows`.

    Windows of one segment overlap: here a view of the run, copied only for many long segments.
    """
    num, length, dim = window.num, run.shape[1] - window.size + 1, run.shape[2]
    view = run.as_strided((num, length, window.size, dim), (run.shape[1] * dim, dim, dim, 1))
    is_shared = num > 1 and 1 < length <= _ROWS
    return KeySet(view if is_shared else view.reshape(num * length, window.size, dim), window.bias)


@by_device
def picked(pages: torch.Tensor, tables: torch.Tensor, picks: torch.Tensor) -> Source:
    """The compressed rows `picks` [rows, num] int64, -1 for none, of requests whose blocks are `tables` [requests, n].

    `pages` [blocks, rows per block, row_bytes] holds MAIN records; as many rows follow one another for each request.
    Here they are unpacked once for all layers that read them, in key sets of PICK_TILE.
    """
    rows, num = picks.shape
    if not num:
        return ()
    requests, blocks, per_block = *tables.shape, pages.shape[1]
    at = picks.clamp(min=0).view(requests, -1)
    if rows * num >= requests * blocks * per_block:  # most rows are picked many times
        at += torch.arange(requests).unsqueeze(1) * (blocks * per_block)
        values = unpack(pages.index_select(0, tables.flatten()).flatten(0, 1), Record.MAIN)
        flat = values.index_select(0, at.view(-1))
    else:
        block = tables.gather(1, at.div(per_block, rounding_mode="floor"))
        place = block.mul_(per_block).add_(at.remainder_(per_block)).view(-1)
        flat = unpack(pages.flatten(0, 1).index_select(0, place), Record.MAIN)
    keys = flat.view(rows, num, -1)
    bias = torch.where(picks < 0, -torch.inf, 0.0)
    tiles = [slice(start, start + PICK_TILE) for start in range(0, num, PICK_TILE)]
    return tuple(KeySet(keys[:, tile], bias[:, tile]) for tile in tiles)


def attend(
    q: torch.Tensor, key_sets: Sequence[KeySet], sink: torch.Tensor, scale: float, rounding: Rounding
) -> torch.Tensor:
    """`q` [rows, heads, dim] fp32, `sink` [heads] -> [rows, heads, dim], rounded.

    Each key set is one product per row of a fixed shape, and sets are added in order, so a row's bits depend on its
    own key sets only. A set that is empty for a row adds exact zeros: leaving it out changes nothing.
    """
    if len(q) > _ROWS:  # the scores of so many stay in a cache
        parts = []
        length = max((keys.shape[1] for keys, _ in key_sets if keys.dim() == 4), default=1)
        step = max(_ROWS // length, 1) * length
        for start in range(0, len(q), step):
            rows = slice(start, start + step)
            some = [KeySet(_part(keys, rows), bias[rows]) for keys, bias in key_sets]
            parts.append(attend(q[rows], some, sink, scale, rounding))
        return torch.cat(parts)
    scaled = q.numpy() * np.float32(scale)
    scores, values = [], []
    for keys, bias in key_sets:
        values.append(keys.numpy())
        product = _product(scaled, values[-1].swapaxes(-1, -2))  # [rows, heads, num_keys]
        product += bias.numpy()[:, None]
        scores.append(torch.from_numpy(product))
    top = scores[0].amax(-1, keepdim=True)
    for other in scores[1:]:
        top = torch.maximum(top, other.amax(-1, keepdim=True))
    top.clamp_(min=_LOWEST)
    total = (sink[:, None] - top).exp_()
    out: torch.Tensor | None = None
    for score, value in zip(scores, values, strict=True):
        weights = score.sub_(top)
        np.exp(array := weights.numpy(), out=array)
        total = total + weights.sum(-1, keepdim=True)
        part = torch.from_numpy(_product(rounding(weights).numpy(), value))
        out = part if out is None else out.add_(part)
    assert out is not None
    return rounding(out.div_(total))


def _part(keys: torch.Tensor, rows: slice) -> torch.Tensor:
    """Those of some rows, whole segments where there are any."""
    length = keys.shape[1] if keys.dim() == 4 else 1
    return keys[rows.start // length : rows.stop // length]


def _product(rows: Array, matrices: Array) -> Array:
    """`rows` [rows, heads, k], each with its own of `matrices` [rows, k, n] or [segments, length, k, n]."""
    parts = rows if matrices.ndim == 3 else rows.reshape(*matrices.shape[:2], *rows.shape[1:])
    found: Array = np.matmul(parts, matrices)
    return found.reshape(*rows.shape[:2], -1)


@by_device
def sparse_attend(
    q: torch.Tensor,
    window: Source,
    picks: Source,
    sink: torch.Tensor,
    scale: float,
    rotation: Rotation,
    rounding: Rounding,
) -> torch.Tensor:
    """`attend` over both sources, then the inverse rotation; rounded after both."""
    key_sets = [*_key_sets(window, q.shape[-1]), *_key_sets(picks, q.shape[-1])]
    return rounding(rotate_(attend(q, key_sets, sink, scale, rounding), rotation.inverse))


def _key_sets(source: Source, dim: int) -> Sequence[KeySet]:
    if isinstance(source, KeySet):
        return [source]
    if not isinstance(source, Keys):
        return source
    if not source.named.shape[1]:
        return []
    flat = source.named.reshape(-1)
    if source.record is not None:
        values = gather(source.cache, flat, source.record)
    else:
        values = source.cache[flat.clamp(min=0)].to(torch.float32)
    bias = torch.zeros(source.named.shape).masked_fill_(source.named < 0, -torch.inf)
    return [KeySet(values.view(*source.named.shape, dim), bias)]
