"""One layer: attention and experts between two single-pass mixes (spec §2.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention import Attention
from kernels.checkpoint import Checkpoint
from kernels.config import LayerRole, ModelConfig
from kernels.group import Group
from kernels.moe import MoE
from kernels.ops.linear import by_columns
from kernels.ops.mix import Mix, MixWeights, collapse_norm, expand, mix
from kernels.ops.rounding import Rounding
from kernels.step import Step


class Block:
    """Weights of a backbone layer, except its Engram, or of a draft stage, around its `attention`."""

    def __init__(
        self,
        config: ModelConfig,
        role: LayerRole,
        checkpoint: Checkpoint,
        rounding: Rounding,
        attention: Attention,
        group: Group | None,
    ) -> None:
        self.config, self.role, self.round = config, role, rounding
        self.attention = attention
        self.moe = MoE(config, role, checkpoint, rounding, group)
        name, dim, num = role.name, config.hidden_size, config.hc_mult
        self.attn_norm = checkpoint.tensor(f"{name}.attn_norm.weight", dim)
        self.ffn_norm = checkpoint.tensor(f"{name}.ffn_norm.weight", dim)

        def mix_weights(part: str) -> MixWeights:
            columns = (2 + num) * num
            scale = checkpoint.tensor(f"{name}.hc_{part}_scale", 3)
            return MixWeights(
                by_columns(checkpoint.tensor(f"{name}.hc_{part}_fn", columns, num * dim)),
                checkpoint.tensor(f"{name}.hc_{part}_base", columns),
                scale.repeat_interleave(torch.tensor([num, num, num * num], device=scale.device)),
            )

        self.attn_mix, self.ffn_mix = mix_weights("attn"), mix_weights("ffn")

    def project(self, streams: torch.Tensor, pre: torch.Tensor, step: Step) -> Sequence[torch.Tensor]:
        """What attention reads of `streams` [rows, C, dim] through the `pre` [rows, C] of the sub-layer before."""
        x = collapse_norm(streams, pre, self.attn_norm, self.config.rms_norm_eps, self.round)
        return self.attention.project(x, step)

    def forward(
        self, streams: torch.Tensor, projected: Sequence[torch.Tensor], step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`streams` [rows, C, dim] and what `project` read of them -> the streams and `pre` for the next layer.

        The mix is delayed: a sub-layer reads through the previous one's `pre`, and writes through its own.
        """
        eps, r = self.config.rms_norm_eps, self.round
        mixed = self._mix(streams, self.attn_mix)
        y = self.attention.forward(projected, step)
        step.record(f"{self.role.name}.attn_out", y)
        streams, pre = expand(y, streams, mixed, r), mixed.pre
        mixed = self._mix(streams, self.ffn_mix)
        y = self.moe.forward(collapse_norm(streams, pre, self.ffn_norm, eps, r), step)
        step.record(f"{self.role.name}.ffn_out", y)
        streams = expand(y, streams, mixed, r)
        step.record(f"{self.role.name}.out", streams)
        step.record(f"{self.role.name}.pre_out", mixed.pre)
        return streams, mixed.pre

    def _mix(self, streams: torch.Tensor, weights: MixWeights) -> Mix:
        c = self.config
        return mix(streams, weights, c.hc_eps, c.rms_norm_eps, c.hc_sinkhorn_iters)
