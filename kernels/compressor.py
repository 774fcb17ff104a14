"""The writer of a layer's compressed KV and index keys (spec §4.1, §4.2)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint, Weight
from kernels.config import LayerRole, ModelConfig
from kernels.layout import Emission
from kernels.ops.compress import pool_norm
from kernels.ops.linear import by_columns, linear
from kernels.ops.pack import Record, pack
from kernels.ops.rope import Rotation, frequencies, rotate_
from kernels.ops.rounding import Rounding, rms_norm
from kernels.step import Step


class Compressor:
    """Weights of `attn.compressor` and of the key side of `attn.indexer`, in a layer that owns its KV."""

    def __init__(self, config: ModelConfig, role: LayerRole, checkpoint: Checkpoint, rounding: Rounding) -> None:
        self.config, self.role, self.round = config, role, rounding
        c, name = config, f"layers.{role.layer}.attn"
        parts = [checkpoint.tensor(f"{name}.compressor.wkv.weight", c.head_dim, c.hidden_size)]
        if role.ratio == 2:
            parts.append(checkpoint.tensor(f"{name}.compressor.wgate.weight", c.head_dim, c.hidden_size))
        self.projection = Weight(torch.cat(parts), quantized=False)
        self.norm = checkpoint.tensor(f"{name}.compressor.norm.weight", c.head_dim)
        self.wk = by_columns(checkpoint.tensor(f"{name}.indexer.wk.weight", c.index_head_dim, c.head_dim))
        self.k_norm = checkpoint.tensor(f"{name}.indexer.k_norm.weight", c.index_head_dim)
        self.freqs = frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_scaling).to(checkpoint.device)

    def forward(self, projected: torch.Tensor, step: Step) -> None:
        """Write the rows that this batch completes, from `projected` [padded rows, head_dim or 2 head_dim] fp32."""
        c, r, layer = self.config, self.round, self.role.layer
        kv = step.pool.kv
        emission = step.layout.emission(self.role.ratio)
        pairs = self._pairs(projected.view(-1, 2, c.head_dim), emission, step) if self.role.ratio == 2 else None
        if not len(emission.rows):
            return
        if pairs is not None:
            latent = pool_norm(*pairs, self.norm, c.rms_norm_eps, r)
        else:
            latent = rms_norm(r(projected[emission.rows]), self.norm, c.rms_norm_eps, r)
        rotation = Rotation.at(emission.positions, self.freqs)
        # Index keys come from the un-rotated latent, so they go first.
        keys = rms_norm(r(linear(latent, self.wk)), self.k_norm, c.rms_norm_eps, r)
        keys = r(rotate_(keys.unsqueeze(1), rotation)).squeeze(1)
        kv.index_k[layer].flatten(0, 1)[emission.target] = pack(keys, Record.INDEX)
        latent = r(rotate_(latent.unsqueeze(1), rotation)).squeeze(1)
        kv.main[layer].flatten(0, 1)[emission.target] = pack(latent, Record.MAIN)

    def _pairs(self, new: torch.Tensor, emission: Emission, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tokens' kv and score of each completed pair, [emitted, 2, head_dim]; keeps the last tokens for later."""
        ring = step.pool.pair[self.role.layer].flatten(0, 1)
        first, second = new[emission.partner], new[emission.rows]
        if len(emission.carried):
            first[emission.carried] = ring[emission.carried_from]
        layout = step.layout
        ring[layout.pair.target] = new[layout.pair.source]
        return first, second
