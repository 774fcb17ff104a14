"""What the layers of one forward pass share: the layout, the state, the rotations, and the picks of index owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.batch import Segment
from kernels.cache import StatePool
from kernels.layout import Layout
from kernels.ops.attention import Source
from kernels.ops.rope import Rotation


@dataclass
class Step:
    """Lives for one forward pass; all rows of tensors are those of `layout`.

    `window` and `compressed` rotate the batch rows in layers without and with compressed KV. `history` [padded rows, n]
    holds the compressed ids of each row's last tokens for Engram, -1 for those that are none. `images` [padded rows]
    says which rows are positions of images, None when there are none. `picked` holds, for each group, the compressed
    rows that the last index owner picked: the Reuse layers behind it read the same ones. `candidates` holds the
    candidate mask of each group, None while every block is one. `rows` are the batch rows that went on after `narrow`,
    ascending; None before it, for all of them. `taps` [padded rows, C, dim] are the streams that the draft stages read.
    `history` and `rows` lie on the host, all else on the pool's device.
    """

    layout: Layout
    pool: StatePool
    window: Rotation
    compressed: Rotation
    trace: dict[str, torch.Tensor] | None
    history: torch.Tensor | None = None
    images: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    taps: list[torch.Tensor] = field(default_factory=list)
    picked: list[Source] = field(default_factory=list)
    candidates: list[torch.Tensor | None] = field(default_factory=list)

    def narrow(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Go on with the rows of `segments`, parts of the present ones, in decoder layers.

        Returns their present row numbers on the device, [new padded rows]; rows that only fill the tile repeat the
        first row. What index owners left is dropped: the layer where this happens owns its picks.
        """
        if not segments:
            self.rows = torch.empty(0, dtype=torch.int64)
            return self.rows
        layout = Layout(segments, self.pool, in_decoder=True)
        on_host = self.layout.find(layout)
        rows = on_host.to(self.pool.device)
        self.layout, self.rows = layout, on_host[: layout.num_rows]
        self.window = Rotation(self.window.cos[rows], self.window.sin[rows])
        self.compressed = Rotation(self.compressed.cos[rows], self.compressed.sin[rows])
        self.history = None if self.history is None else self.history[on_host]
        self.images = None if self.images is None else self.images[rows]
        self.taps = [tap[rows] for tap in self.taps]
        self.picked, self.candidates = [], []
        return rows

    def record(self, name: str, value: torch.Tensor) -> None:
        """Keep a copy of the real rows of `value` under `name` when a trace was asked for."""
        if self.trace is not None:
            self.trace[name] = value[: self.layout.num_rows].clone()
