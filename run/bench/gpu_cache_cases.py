"""Inputs for the kernels around the caches: quantisers, records, attention, index scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.ops import quant
from kernels.ops.attention import Keys, KeySet
from kernels.ops.index import Cache
from kernels.ops.pack import Record, pack
from kernels.ops.rounding import Rounding, keep, to_bf16
from run.bench.gpu_case import Case, Draw, num_bytes

_PER_BLOCK = 64  # compressed rows: those of ratio 2


def _quantisers(name: str, function: Callable[..., Any]) -> list[Case]:
    def plain(draw: Draw) -> tuple[Any, ...]:
        return (draw.normal(draw.sizes.rows, draw.sizes.dim),)

    def rotated(draw: Draw) -> tuple[Any, ...]:
        s = draw.sizes
        return (draw.normal(s.rows, s.heads, s.head_dim), draw.rotation(), function, to_bf16)

    return [
        Case(name, f"quant.{name}", plain, (0,)),
        Case(f"rotate, {name}", "rope.rotate_quantize", rotated, (0, 1)),
    ]


def _rotate(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    return (draw.normal(s.rows, s.heads, s.head_dim), draw.rotation())


def _packing(record: Record) -> list[Case]:
    def vectors(draw: Draw, rows: int) -> torch.Tensor:
        return draw.normal(rows, draw.sizes.index_dim if record is Record.INDEX else draw.sizes.head_dim)

    def unpacked(draw: Draw) -> tuple[Any, ...]:
        return (vectors(draw, draw.sizes.rows), record)

    def packed(draw: Draw) -> tuple[Any, ...]:
        held = draw.sizes.held
        return (pack(vectors(draw, held), record), draw.integers(-1, held, draw.sizes.rows * 5), record)

    def moved(args: tuple[Any, ...], result: torch.Tensor) -> int:
        num, row_bytes = len(args[1]), args[0].shape[1]
        return int(num * (row_bytes + 8) + result.nbytes)

    return [
        Case(f"pack {record.name}", "pack.pack", unpacked, (0,)),
        Case(f"gather {record.name}", "pack.gather", packed, (1,), moved=moved),
    ]


def _attention(rounding: Rounding) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        s = draw.sizes

        def keys(count: int, record: Record) -> Keys:
            stored = pack(torch.randn(s.held, s.head_dim, generator=draw.generator), record)
            # Some queries see few keys, the second none.
            index = draw.integers(0, s.held, s.rows, count)
            seen = draw.integers(0, count * 2, s.rows, 1)
            seen[1:2] = 0
            return Keys(stored, torch.where(torch.arange(count) < seen, index, -1), record)

        q = torch.randn(s.rows, s.heads, s.head_dim, generator=draw.generator).bfloat16().float()
        sink = torch.randn(s.heads, generator=draw.generator)
        window, picked = keys(s.window, Record.WINDOW), keys(s.picks, Record.MAIN)
        return (q, window, picked, sink, s.head_dim**-0.5, draw.rotation(), rounding)

    def moved(args: tuple[Any, ...], result: torch.Tensor) -> int:
        read = sum(int((keys.named >= 0).sum()) * int(keys.cache[0].nbytes) for keys in args[1:3])
        return read + num_bytes((args[0], args[1].named, args[2].named, result))

    kind, tolerance = ("bf16", 4e-3) if rounding is to_bf16 else ("fp32", 2e-6)
    return Case(f"attention, {kind}", "attention.sparse_attend", make, (0, 1, 2, 5), tolerance, moved)


def _gathered(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    sets = []
    for count in (s.window, min(s.picks, 64)):
        keys = torch.randn(s.rows, count, s.head_dim, generator=draw.generator).bfloat16().float()
        hidden = draw.integers(0, 2, s.rows, count) == 0
        sets.append(KeySet(keys, torch.zeros(s.rows, count).masked_fill_(hidden, -torch.inf)))
    q = torch.randn(s.rows, s.heads, s.head_dim, generator=draw.generator).bfloat16().float()
    sink = torch.randn(s.heads, generator=draw.generator)
    return (q, (), tuple(sets), sink, s.head_dim**-0.5, draw.rotation(), to_bf16)


def _index(candidates: bool, rounding: Rounding) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        s = draw.sizes
        q = quant.fp4_e8m0_qdq(torch.randn(s.rows, s.index_heads, s.index_dim, generator=draw.generator))
        weights = torch.randn(s.rows, s.index_heads, generator=draw.generator).bfloat16().float()
        blocks = s.context // _PER_BLOCK
        held = s.slots * blocks + 1
        keys = pack(torch.randn(held * _PER_BLOCK, s.index_dim, generator=draw.generator), Record.INDEX)
        cache = Cache(keys.view(held, _PER_BLOCK, -1), draw.integers(0, held, s.rows, blocks))
        mask = draw.integers(0, 2, s.rows, s.context) == 0 if candidates else None
        return (q, weights, cache, draw.integers(0, s.context + 1, s.rows), mask, rounding)

    def moved(args: tuple[Any, ...], result: torch.Tensor) -> int:
        return int(args[3].sum()) * int(args[2].pages.shape[2]) + num_bytes((args[:2], args[2].tables, args[4], result))

    kind, tolerance = ("bf16", 4e-3) if rounding is to_bf16 else ("fp32", 2e-6)
    name = f"index scores, {'candidates, ' if candidates else ''}{kind}"
    return Case(name, "index.cached_scores", make, (0, 1, 2, 3, 4), tolerance, moved)


CACHE_CASES = [
    *_quantisers("fp8_qdq", quant.fp8_qdq),
    *_quantisers("fp4_e8m0_qdq", quant.fp4_e8m0_qdq),
    *_quantisers("fp4_e4m3_qdq", quant.fp4_e4m3_qdq),
    Case("rotate", "rope.rotate_", _rotate, (0, 1)),
    *(case for record in Record for case in _packing(record)),
    Case("attention, gathered keys", "attention.sparse_attend", _gathered, (0, 2, 5), 4e-3),
    _attention(keep),
    _attention(to_bf16),
    _index(False, keep),
    _index(True, to_bf16),
]
