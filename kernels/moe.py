"""One layer's mixture of experts (spec §2.4)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint
from kernels.config import LayerRole, ModelConfig
from kernels.experts import load_experts
from kernels.group import Group
from kernels.ops.experts import activate, route
from kernels.ops.rounding import Rounding
from kernels.projection import Projection, joined
from kernels.step import Step


class MoE:
    """Weights of a layer's `ffn`: router, routed experts, shared expert."""

    def __init__(
        self, config: ModelConfig, role: LayerRole, checkpoint: Checkpoint, rounding: Rounding, group: Group | None
    ) -> None:
        self.config, self.role, self.round = config, role, rounding
        c, name = config, f"{role.name}.ffn"
        gate = checkpoint.matrix(f"{name}.gate", role.num_experts, c.hidden_size)
        self.bias = checkpoint.tensor(f"{name}.gate.bias", role.num_experts)
        # Positions of images are routed by a bias of their own; draft stages see none.
        sees_images = c.image_token_id is not None and role.mode != "draft"
        self.image_bias = checkpoint.tensor(f"{name}.gate.bias_vl", role.num_experts) if sees_images else None
        self.experts = load_experts(c, role, checkpoint, rounding, group)
        shared, inter, dim = f"{name}.shared_experts", c.moe_intermediate_size, c.hidden_size
        w1, w3 = (checkpoint.matrix(f"{shared}.{part}", inter, dim) for part in ("w1", "w3"))
        self.w_in = Projection(joined(w1, w3), gate)
        self.shared_w2 = Projection(checkpoint.matrix(f"{shared}.w2", dim, inter))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`x` [padded rows, dim], normed -> [padded rows, dim]; rows that only fill a tile get the shared part."""
        c, r, num_rows = self.config, self.round, step.layout.num_rows
        # Shared and routed experts read the same: what is quantised in the same way is quantised once.
        read = self.experts.prepare(x)
        shared, logits = self.w_in.forward(x, read if self.experts.reads_fp8 else None)
        bias = self.bias
        if step.images is not None and self.image_bias is not None:
            bias = torch.where(step.images[:, None], self.image_bias, bias)
        routes = route(logits, bias, self.role.num_picks, c.routed_scaling_factor)
        step.record(f"{self.role.name}.gate_indices", routes.experts)
        step.record(f"{self.role.name}.gate_weights", routes.weights)
        hidden = r(activate(r(shared), c.swiglu_limit))
        out = r(self.shared_w2.forward(hidden)[0])
        real = type(routes)(routes.experts[:num_rows], routes.weights[:num_rows])
        out[:num_rows] += self.experts.run(read[:num_rows], real)
        return r(out)
