"""What it takes to check a kernel: inputs of any size, a reference, a tolerance, and the bytes it has to move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from kernels.ops.attention import Keys
from kernels.ops.index import Cache
from kernels.ops.rope import Rotation, frequencies


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
    index_heads: int
    slots: int
    columns: int  # outputs of a product
    experts: int
    routed: int  # n_routed_experts, of which only `experts` have weights here
    expert_picks: int
    inter: int  # moe_intermediate_size
    streams: int  # hc_mult
    memory: int  # engram_head_dim
    vocab: int
    context: int  # compressed rows of one request, whole key tiles


REAL = Sizes(
    rows=64, dim=5120, heads=64, head_dim=512, rope=64, index_dim=128, held=65536, window=128, picks=512,
    index_heads=32, slots=16, columns=8192, experts=16, routed=384, expert_picks=6, inter=2304, streams=4,
    memory=256, vocab=129280, context=16384,
)  # fmt: skip
# Real widths with little work, for compilers. (A reference that unpacks all 384 experts needs 200 GB, so REAL has 16.)
WIDE = REAL._replace(rows=2, held=256, slots=2, columns=64, experts=2, expert_picks=2, context=128)
SMALL = Sizes(
    rows=3, dim=96, heads=5, head_dim=64, rope=32, index_dim=32, held=200, window=7, picks=70,
    index_heads=3, slots=2, columns=40, experts=5, routed=11, expert_picks=3, inter=32, streams=3,
    memory=96, vocab=1500, context=256,
)  # fmt: skip


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

    def codes(self, *shape: int) -> torch.Tensor:
        """Any bytes."""
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)

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
        return num_bytes((args, result))

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


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in `value`."""
    return sum(tensor.nbytes for tensor in tensors(value))


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


def cut_to(case: Case, args: tuple[Any, ...], rows: slice) -> tuple[Any, ...]:
    """Copies of `args` with some batch rows only; a cache stays whole."""

    def cut(value: Any) -> Any:
        if isinstance(value, Keys):
            return value._replace(named=cut(value.named))
        if isinstance(value, Cache):
            return value._replace(tables=cut(value.tables))
        return mapped(value, lambda tensor: tensor[rows].clone())

    return tuple(cut(arg) if number in case.by_row else arg for number, arg in enumerate(args))


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
