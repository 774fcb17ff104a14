"""Inputs for every kernel, at any size: the tests interpret small odd ones, `gpu_check` runs real ones on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from kernels.ops import quant
from kernels.ops.attention import Keys, KeySet
from kernels.ops.pack import Record, pack
from kernels.ops.rope import Rotation, frequencies
from kernels.ops.rounding import Rounding, keep, to_bf16


class Sizes(NamedTuple):
    """What the inputs are made of; the names are those of config.json, shortened."""

    rows: int
    dim: int  # hidden_size
    heads: int
    head_dim: int
    rope: int
    index_dim: int  # index_head_dim
    held: int  # rows of a cache
    window: int
    picks: int


REAL = Sizes(rows=64, dim=5120, heads=64, head_dim=512, rope=64, index_dim=128, held=65536, window=128, picks=512)
WIDE = REAL._replace(rows=2, held=256)  # real widths, little work: what a kernel is compiled for
SMALL = Sizes(rows=3, dim=96, heads=5, head_dim=64, rope=32, index_dim=32, held=200, window=7, picks=70)


class Draw:
    """Random inputs from one seed."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes = sizes
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """Values over many magnitudes, exact in BF16, some of them zero: inputs of either compute mode."""
        spread = torch.randn(shape[:-1], generator=self.generator).mul_(2).exp_().unsqueeze(-1)
        x = torch.randn(shape, generator=self.generator) * spread
        return x.masked_fill_(torch.rand(shape, generator=self.generator) < 0.01, 0.0).bfloat16().float()

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 from `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def rotation(self) -> Rotation:
        s = self.sizes
        return Rotation.at(torch.arange(s.rows) * 7 + 3, frequencies(s.rope, 10000.0, None))


@dataclass(frozen=True)
class Case:
    """One call of `kernels/ops/MODULE.py`'s `op` "MODULE.NAME".

    `make` draws its arguments on the CPU; those at `by_row` have the batch rows first. `tolerance` is the permitted
    RMS of the difference over that of the reference, 0 for the same bits. `moved` counts the bytes that a call has to
    move, given arguments and results; by default each of their tensors once.
    """

    name: str
    op: str
    make: Callable[[Draw], tuple[Any, ...]]
    by_row: tuple[int, ...]
    tolerance: float = 0.0
    moved: Callable[[tuple[Any, ...], Any], int] | None = None

    def reference(self, args: tuple[Any, ...]) -> Any:
        """The result on the CPU."""
        return self._function("kernels.ops")(*args)

    def kernel(self, args: tuple[Any, ...]) -> Any:
        """The result of the Triton kernel, wherever the tensors are."""
        return self._function("kernels.ops.gpu")(*args)

    def moved_bytes(self, args: tuple[Any, ...], result: Any) -> int:
        if self.moved is not None:
            return self.moved(args, result)
        return sum(tensor.nbytes for tensor in tensors((args, result)))

    def _function(self, package: str) -> Callable[..., Any]:
        module, _, name = self.op.partition(".")
        function: Callable[..., Any] = getattr(import_module(f"{package}.{module}"), name)
        return function


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, field.name) for field in fields(value)])


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: mapped(getattr(value, field.name), change) for field in fields(value)})
    return value


def difference(got: Any, want: Any) -> float:
    """The largest relative RMS difference of the tensors of two results, 0 for the same values; NaN is infinite."""
    worst = 0.0
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    assert pairs
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if torch.equal(a.cpu(), b.cpu()):
            continue
        if not b.dtype.is_floating_point:
            return float("inf")
        x, y = a.cpu().double(), b.cpu().double()
        same = torch.where(x == y, 0.0, x - y)  # infinities of one sign are equal
        finite = torch.where(y.isfinite(), y, 0.0)
        error = float(same.square().mean().sqrt() / finite.square().mean().sqrt().clamp(min=1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst


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


def _attention(record: Record | None, rounding: Rounding) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        s = draw.sizes

        def keys(count: int, record: Record | None) -> Keys:
            cache = torch.randn(s.held, s.head_dim, generator=draw.generator)
            stored = cache.bfloat16() if record is None else pack(cache, record)
            # Some queries see few keys, the second none.
            index = draw.integers(0, s.held, s.rows, count)
            seen = draw.integers(0, count * 2, s.rows, 1)
            seen[1] = 0
            return Keys(stored, torch.where(torch.arange(count) < seen, index, -1), record)

        q = torch.randn(s.rows, s.heads, s.head_dim, generator=draw.generator).bfloat16().float()
        sink = torch.randn(s.heads, generator=draw.generator)
        window, picked = keys(s.window, record and Record.WINDOW), keys(s.picks, record)
        return (q, window, picked, sink, s.head_dim**-0.5, draw.rotation(), rounding)

    def moved(args: tuple[Any, ...], result: torch.Tensor) -> int:
        row_bytes: int = sum(int((keys.named >= 0).sum()) * keys.cache[0].nbytes for keys in args[1:3])
        return row_bytes + sum(int(t.nbytes) for t in (args[0], args[1].named, args[2].named, result))

    kind = f"{'values' if record is None else 'records'}, {'bf16' if rounding is to_bf16 else 'fp32'}"
    tolerance = 4e-3 if rounding is to_bf16 else 2e-6
    return Case(f"attention, {kind}", "attention.sparse_attend", make, (0, 1, 2, 5), tolerance, moved)


def _gathered(draw: Draw) -> tuple[Any, ...]:
    s = draw.sizes
    sets = []
    for count in (s.window, min(s.picks, 64)):
        keys = torch.randn(s.rows, count, s.head_dim, generator=draw.generator).bfloat16().float()
        hidden = draw.integers(0, 2, s.rows, count) == 0
        sets.append(KeySet(keys, torch.zeros(s.rows, count).masked_fill_(hidden, -torch.inf)))
    q = torch.randn(s.rows, s.heads, s.head_dim, generator=draw.generator).bfloat16().float()
    return (q, sets, torch.randn(s.heads, generator=draw.generator), s.head_dim**-0.5, to_bf16)


CASES: list[Case] = [
    *_quantisers("fp8_qdq", quant.fp8_qdq),
    *_quantisers("fp4_e8m0_qdq", quant.fp4_e8m0_qdq),
    *_quantisers("fp4_e4m3_qdq", quant.fp4_e4m3_qdq),
    Case("rotate", "rope.rotate_", _rotate, (0, 1)),
    *(case for record in Record for case in _packing(record)),
    Case("attention, gathered keys", "attention.attend", _gathered, (0, 1), 4e-3),
    _attention(None, keep),
    _attention(Record.MAIN, to_bf16),
]
