"""What the layers of one forward pass share: the layout, the state, the rotations, and the picks of index owners."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.cache import StatePool
from kernels.layout import Layout
from kernels.ops.attention import KeySet
from kernels.ops.rope import Rotation


@dataclass
class Step:
    """Lives for one `Model.forward`.

    `window` and `compressed` rotate the batch rows in layers without and with compressed KV. `key_sets` holds the
    gathered compressed rows that the last index owner picked: the Reuse layers behind it read the same ones.
    `candidates` holds the candidate mask of each group, None while every block is one.
    """

    layout: Layout
    pool: StatePool
    window: Rotation
    compressed: Rotation
    trace: dict[str, torch.Tensor] | None
    key_sets: tuple[KeySet, ...] = ()
    candidates: list[torch.Tensor | None] = field(default_factory=list)

    def record(self, name: str, value: torch.Tensor) -> None:
        """Keep a copy of the real rows of `value` under `name` when a trace was asked for."""
        if self.trace is not None:
            self.trace[name] = value[: self.layout.num_rows].clone()
