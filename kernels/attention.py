"""One layer's attention: projections, sliding window, compressed rows, grouped output (spec §3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.checkpoint import Checkpoint
from kernels.compressor import Compressor
from kernels.config import LayerRole, ModelConfig
from kernels.indexer import Indexer
from kernels.layout import Group
from kernels.ops.attention import sliding, sparse_attend
from kernels.ops.linear import by_columns, grouped_linear
from kernels.ops.pack import window_rows
from kernels.ops.rope import Rotation, rotate_
from kernels.ops.rounding import Rounding, rms_norm
from kernels.projection import Projection
from kernels.step import Step


class Attention:
    """Weights of a layer's `attn`; projections of one input are kept as one matrix."""

    def __init__(self, config: ModelConfig, role: LayerRole, checkpoint: Checkpoint, rounding: Rounding) -> None:
        self.config, self.role, self.round = config, role, rounding
        c, name = config, f"{role.name}.attn"
        heads = c.num_attention_heads
        self.compressor = Compressor(c, role, checkpoint, rounding) if role.owns_kv else None
        self.indexer = Indexer(c, role, checkpoint, rounding) if role.owns_index else None
        parts = [
            checkpoint.matrix(f"{name}.wq_a", c.q_lora_rank, c.hidden_size),
            checkpoint.matrix(f"{name}.wkv", c.head_dim, c.hidden_size),
        ]
        q_parts = [checkpoint.matrix(f"{name}.wq_b", heads * c.head_dim, c.q_lora_rank)]
        if self.compressor is not None:
            parts.append(self.compressor.projection)
        if self.indexer is not None:
            parts.append(self.indexer.head_weights)
            q_parts.append(self.indexer.queries)
        self.w_in, self.wq_b = Projection(*parts), Projection(*q_parts)
        self.q_norm = checkpoint.tensor(f"{name}.q_norm.weight", c.q_lora_rank)
        self.kv_norm = checkpoint.tensor(f"{name}.kv_norm.weight", c.head_dim)
        self.sink = checkpoint.tensor(f"{name}.attn_sink", heads)
        group_dim = heads * c.head_dim // c.o_groups
        # The published code turns a quantised wo_a back into BF16 and leaves its input alone.
        wo_a = checkpoint.matrix(f"{name}.wo_a", c.o_groups * c.o_lora_rank, group_dim).fp32
        self.wo_a = by_columns(wo_a.view(c.o_groups, c.o_lora_rank, group_dim))
        self.wo_b = Projection(checkpoint.matrix(f"{name}.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank))

    def project(self, x: torch.Tensor, step: Step) -> Sequence[torch.Tensor]:
        """What attention reads of `x` [padded rows, dim], normed; a KV owner writes its compressed rows."""
        projected = self.w_in.forward(x)
        if self.compressor is not None:
            self.compressor.forward(projected[2], step)
        return projected

    def forward(self, projected: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
        """What `project` gave, for the rows wanted -> [padded rows, dim]; writes this layer's window rows."""
        c, r = self.config, self.round
        rotation = step.compressed if self.role.ratio else step.window
        rows, heads = projected[0].shape[0], c.num_attention_heads
        qr = rms_norm(r(projected[0]), self.q_norm, c.rms_norm_eps, r)
        kv = rms_norm(r(projected[1]), self.kv_norm, c.rms_norm_eps, r)
        queries = self.wq_b.forward(qr)
        both = torch.cat((r(queries[0]).view(rows, heads, c.head_dim), kv.unsqueeze(1)), 1)
        both = r(rotate_(both, rotation))
        q, kv = both[:, :heads], window_rows(both[:, heads])
        if self.indexer is not None:
            step.picked = self.indexer.forward(r(queries[1]), projected[-1], step)
        out = self._attend(q, kv, rotation, step).view(rows, c.o_groups, -1)
        return r(self.wo_b.forward(r(grouped_linear(out, self.wo_a)))[0])

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, rotation: Rotation, step: Step) -> torch.Tensor:
        """`q` [padded rows, heads, head_dim], `kv` [padded rows, ..] as kept -> outputs rotated back, as `q`."""
        layout, layer = step.layout, self.role.layer
        ring = step.pool.swa[layer].flatten(0, 1)
        scale = self.config.head_dim**-0.5
        parts = []
        for number, group in enumerate(layout.groups):
            rows = group.rows
            window = sliding(self._run(kv[rows], ring, group), group.window)
            picks = step.picked[number] if self.role.ratio else ()
            part = sparse_attend(q[rows], window, picks, self.sink, scale, rotation.of(rows), self.round)
            parts.append(part if group.real is None else part[group.real])
        # Only now: earlier rows of a chunk still read the ring rows that its later ones overwrite.
        ring[layout.ring.target] = kv[layout.ring.source]
        if layout.padded > layout.num_rows:
            parts.append(q.new_zeros(layout.padded - layout.num_rows, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, kv: torch.Tensor, ring: torch.Tensor, group: Group) -> torch.Tensor:
        """Each segment's rows behind those before it: [num_segments, window - 1 + length, ..]."""
        num, length, width = group.num_segments, group.length, kv.shape[-1]
        before = ring.index_select(0, group.prefix).view(num, self.config.sliding_window - 1, width)
        return torch.cat((before, kv.view(num, length, width)), 1)
