"""Matrices that read the same input, as few products; quantised ones see a quantised input (spec §2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.checkpoint import Weight
from kernels.ops.linear import Fp8Weight, by_columns, fp8_linear, linear
from kernels.ops.quant import fp8_qdq


def joined(*parts: Weight) -> Weight:
    """Matrices `[n_i, k]`, all stored quantised or none, below one another."""
    stored = [part.values for part in parts if isinstance(part.values, Fp8Weight)]
    if len(stored) == len(parts) and all(len(part) % 32 == 0 for part in parts[:-1]):
        codes = torch.cat([part.codes.view(torch.uint8) for part in stored])
        scales = torch.cat([part.scale.view(torch.uint8) for part in stored])
        return Weight(Fp8Weight(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)), True)
    return Weight(torch.cat([part.fp32 for part in parts]), parts[0].quantized)


class Projection:
    """`parts` [n_i, k] in the order of the outputs: those stored quantised first, then the plain ones."""

    def __init__(self, *parts: Weight) -> None:
        self.quantized_sizes = [len(part) for part in parts if part.quantized]
        self.plain_sizes = [len(part) for part in parts if not part.quantized]
        quantized = [part for part in parts if part.quantized]
        plain = [part.fp32 for part in parts if not part.quantized]
        if [part.quantized for part in parts] != [True] * len(quantized) + [False] * len(plain):
            raise ValueError("quantised parts come first")
        self.quantized: torch.Tensor | Fp8Weight | None = None
        if quantized:
            weight = joined(*quantized)
            stored = weight.values
            self.quantized = stored if isinstance(stored, Fp8Weight) else by_columns(weight.fp32)
        self.plain = by_columns(torch.cat(plain)) if plain else None

    def forward(self, x: torch.Tensor, quantized: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        """`x` [rows, k] -> one [rows, n_i] fp32, unrounded, per part. `quantized`: what `fp8_qdq` makes of `x`, if the
        caller has it already."""
        outputs: list[torch.Tensor] = []
        if isinstance(self.quantized, torch.Tensor):
            product = linear(fp8_qdq(x) if quantized is None else quantized, self.quantized)
            outputs += product.split_with_sizes(self.quantized_sizes, 1)
        elif self.quantized is not None:
            outputs += fp8_linear(x, self.quantized).split_with_sizes(self.quantized_sizes, 1)
        if self.plain is not None:
            outputs += linear(x, self.plain).split_with_sizes(self.plain_sizes, 1)
        return outputs
