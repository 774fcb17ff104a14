"""Matrices that read the same input, as few products; quantised ones see a quantised input (spec §2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.checkpoint import Weight
from kernels.ops.linear import by_columns, linear
from kernels.ops.quant import fp8_qdq


class Projection:
    """`parts` [n_i, k] in the order of the outputs: those stored quantised first, then the plain ones."""

    def __init__(self, *parts: Weight) -> None:
        self.sizes = [len(part.values) for part in parts]
        quantized = [part.values for part in parts if part.quantized]
        plain = [part.values for part in parts if not part.quantized]
        if [part.quantized for part in parts] != [True] * len(quantized) + [False] * len(plain):
            raise ValueError("quantised parts come first")
        self.quantized = by_columns(torch.cat(quantized)) if quantized else None
        self.plain = by_columns(torch.cat(plain)) if plain else None

    def forward(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """`x` [rows, k] -> one [rows, n_i] fp32, unrounded, per part."""
        outputs = []
        if self.quantized is not None:
            outputs.append(linear(fp8_qdq(x), self.quantized))
        if self.plain is not None:
            outputs.append(linear(x, self.plain))
        if len(self.sizes) == 1:
            return outputs
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return joined.split_with_sizes(self.sizes, 1)
