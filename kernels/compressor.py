"""The writer of a layer's compressed KV and index keys (spec §4.1, §4.2)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint, Weight
from kernels.config import LayerRole, ModelConfig
from kernels.layout import Emission
from kernels.ops.linear import linear
from kernels.ops.quant import fp4_e4m3_qdq, fp4_e8m0_qdq
from kernels.ops.rope import Rotation, frequencies, rotate_quantize
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
        self.wk = checkpoint.tensor(f"{name}.indexer.wk.weight", c.index_head_dim, c.head_dim)
        self.k_norm = checkpoint.tensor(f"{name}.indexer.k_norm.weight", c.index_head_dim)
        self.freqs = frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_scaling)

    def forward(self, projected: torch.Tensor, step: Step) -> None:
        """Write the rows that this batch completes, from `projected` [padded rows, head_dim or 2 head_dim] fp32."""
        c, r, layer = self.config, self.round, self.role.layer
        main, index_k = step.pool.main[layer], step.pool.index_k[layer]
        emission = step.layout.emission(self.role.ratio, main.shape[1])
        if self.role.ratio == 2:
            latent = self._pool_pairs(projected.view(-1, 2, c.head_dim), emission, step)
        else:
            latent = projected[emission.rows]
        if not len(latent):
            return
        latent = rms_norm(r(latent), self.norm, c.rms_norm_eps, r)
        rotation = Rotation.at(emission.positions, self.freqs)
        # Index keys come from the un-rotated latent, so they go first.
        keys = rms_norm(r(linear(latent, self.wk)), self.k_norm, c.rms_norm_eps, r)
        keys = rotate_quantize(keys.unsqueeze(1), rotation, fp4_e8m0_qdq, r).squeeze(1)
        index_k.flatten(0, 1)[emission.target] = keys.to(index_k.dtype)
        latent = rotate_quantize(latent.unsqueeze(1), rotation, fp4_e4m3_qdq, r).squeeze(1)
        main.flatten(0, 1)[emission.target] = latent.to(main.dtype)

    def _pool_pairs(self, new: torch.Tensor, emission: Emission, step: Step) -> torch.Tensor:
        """Per channel a softmax over the two gate values of a pair, applied to its kv: [emitted, head_dim]."""
        ring = step.pool.pair[self.role.layer].flatten(0, 1)
        second = new[emission.rows]
        first = new[emission.partner]
        if len(emission.carried):
            first[emission.carried] = ring[emission.carried_from]
        layout = step.layout
        ring[layout.pair.target] = new[layout.pair.source]
        top = torch.maximum(first[:, 1], second[:, 1])
        a, b = (first[:, 1] - top).exp_(), (second[:, 1] - top).exp_()
        total = a + b
        return (a / total).mul_(first[:, 0]).add_((b / total).mul_(second[:, 0]))
