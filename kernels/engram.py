"""One layer's Engram: table lookup by hashed n-grams, gated addition to the residual (spec §7)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint
from kernels.config import LayerRole, ModelConfig
from kernels.ops.engram import HashTables, add_gated, look_up, table_rows
from kernels.ops.rounding import Rounding
from kernels.projection import Projection


class Engram:
    """Weights of `layers.{i}.engram`; the table stays in its file, in FP8, and is read row by row, on the host."""

    def __init__(
        self, config: ModelConfig, role: LayerRole, tables: HashTables, checkpoint: Checkpoint, rounding: Rounding
    ) -> None:
        self.tables, self.round = tables, rounding
        c, name = config, f"layers.{role.layer}.engram"
        rows, dim, streams = tables.num_rows, c.engram_head_dim, c.hc_mult
        self.codes, self.scale = checkpoint.table(f"{name}.embed", rows, dim)
        width = tables.primes.numel() * dim
        self.wkv = Projection(checkpoint.matrix(f"{name}.wkv", (streams + 1) * c.hidden_size, width))
        q_weight = checkpoint.tensor(f"{name}.q_weight", streams, c.hidden_size)
        self.qk_weight = q_weight * checkpoint.tensor(f"{name}.k_weight", streams, c.hidden_size)

    def forward(self, streams: torch.Tensor, history: torch.Tensor, pad: int) -> torch.Tensor:
        """`streams` [rows, C, dim] with the memory of `history` added: [rows, n] compressed ids, newest first, on the
        host."""
        rows, device = table_rows(history, pad, self.tables), streams.device
        looked_up = look_up(self.codes[rows].to(device), self.scale[rows].to(device))
        alive = (history[:, :1] >= 0).to(device, torch.float32)
        projected = self.round(self.wkv.forward(looked_up)[0])
        return add_gated(streams, projected, self.qk_weight, alive, self.round)
