"""One layer's mixture of experts (spec §2.4)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint
from kernels.config import ModelConfig
from kernels.ops.experts import activate, route, run_experts
from kernels.ops.linear import linear
from kernels.ops.rounding import Rounding
from kernels.step import Step


class MoE:
    """Weights of `layers.{i}.ffn`: router, routed experts stacked, shared expert."""

    def __init__(self, config: ModelConfig, layer: int, checkpoint: Checkpoint, rounding: Rounding) -> None:
        self.config, self.layer, self.round = config, layer, rounding
        c, name = config, f"layers.{layer}.ffn"
        gate = checkpoint.tensor(f"{name}.gate.weight", c.n_routed_experts, c.hidden_size)
        self.bias = checkpoint.tensor(f"{name}.gate.bias", c.n_routed_experts)

        def up(expert: str) -> torch.Tensor:
            shape = (c.moe_intermediate_size, c.hidden_size)
            return torch.cat([checkpoint.tensor(f"{name}.{expert}.{part}.weight", *shape) for part in ("w1", "w3")])

        def down(expert: str) -> torch.Tensor:
            return checkpoint.tensor(f"{name}.{expert}.w2.weight", c.hidden_size, c.moe_intermediate_size)

        routed = [f"experts.{expert}" for expert in range(c.n_routed_experts)]
        self.w13 = torch.stack([up(expert) for expert in routed])
        self.w2 = torch.stack([down(expert) for expert in routed])
        self.w_in = torch.cat((gate, up("shared_experts")))
        self.shared_w2 = down("shared_experts")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`x` [padded rows, dim], normed -> [padded rows, dim]; rows that only fill a tile get the shared part."""
        c, r, num_rows = self.config, self.round, step.layout.num_rows
        projected = linear(x, self.w_in)
        logits = projected[:, : c.n_routed_experts]
        routes = route(logits, self.bias, c.num_experts_per_tok, c.routed_scaling_factor)
        step.record(f"layers.{self.layer}.gate_indices", routes.experts)
        step.record(f"layers.{self.layer}.gate_weights", routes.weights)
        hidden = r(activate(r(projected[:, c.n_routed_experts :]), c.swiglu_limit))
        out = r(linear(hidden, self.shared_w2))
        real = type(routes)(routes.experts[:num_rows], routes.weights[:num_rows])
        out[:num_rows] += run_experts(x, real, self.w13, self.w2, c.swiglu_limit, r)
        return r(out)
