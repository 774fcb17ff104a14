"""One layer's mixture of experts (spec §2.4)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint
from kernels.config import LayerRole, ModelConfig
from kernels.ops.experts import Fp4Weights, activate, route, run_experts, run_fp4_experts
from kernels.ops.linear import by_columns
from kernels.ops.quant import fp8_qdq
from kernels.ops.rounding import Rounding, keep
from kernels.projection import Projection, joined
from kernels.step import Step


class MoE:
    """Weights of a layer's `ffn`: router, routed experts stacked, shared expert."""

    def __init__(self, config: ModelConfig, role: LayerRole, checkpoint: Checkpoint, rounding: Rounding) -> None:
        self.config, self.role, self.round = config, role, rounding
        c, name = config, f"{role.name}.ffn"
        gate = checkpoint.matrix(f"{name}.gate", role.num_experts, c.hidden_size)
        self.bias = checkpoint.tensor(f"{name}.gate.bias", role.num_experts)
        # Positions of images are routed by a bias of their own; draft stages see none.
        sees_images = c.image_token_id is not None and role.mode != "draft"
        self.image_bias = checkpoint.tensor(f"{name}.gate.bias_vl", role.num_experts) if sees_images else None
        routed = [f"{name}.experts.{expert}" for expert in range(role.num_experts)]
        up = checkpoint.experts(routed, ("w1", "w3"), c.moe_intermediate_size, c.hidden_size)
        down = checkpoint.experts(routed, ("w2",), c.hidden_size, c.moe_intermediate_size)
        self.up, self.down = (
            weight.values if isinstance(weight.values, Fp4Weights) else by_columns(weight.fp32) for weight in (up, down)
        )
        self.quantize = fp8_qdq if up.quantized else keep
        shared, inter, dim = f"{name}.shared_experts", c.moe_intermediate_size, c.hidden_size
        w1, w3 = (checkpoint.matrix(f"{shared}.{part}", inter, dim) for part in ("w1", "w3"))
        self.w_in = Projection(joined(w1, w3), gate)
        self.shared_w2 = Projection(checkpoint.matrix(f"{shared}.w2", dim, inter))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`x` [padded rows, dim], normed -> [padded rows, dim]; rows that only fill a tile get the shared part."""
        c, r, num_rows = self.config, self.round, step.layout.num_rows
        # Shared and routed experts read the same: what is quantised in the same way is quantised once.
        read = self.quantize(x) if isinstance(self.up, torch.Tensor) else None
        shared, logits = self.w_in.forward(x, read if self.quantize is fp8_qdq else None)
        bias = self.bias
        if step.images is not None and self.image_bias is not None:
            bias = torch.where(step.images[:, None], self.image_bias, bias)
        routes = route(logits, bias, self.role.num_picks, c.routed_scaling_factor)
        step.record(f"{self.role.name}.gate_indices", routes.experts)
        step.record(f"{self.role.name}.gate_weights", routes.weights)
        hidden = r(activate(r(shared), c.swiglu_limit))
        out = r(self.shared_w2.forward(hidden)[0])
        real = type(routes)(routes.experts[:num_rows], routes.weights[:num_rows])
        if isinstance(self.up, Fp4Weights) and isinstance(self.down, Fp4Weights):
            out[:num_rows] += run_fp4_experts(x[:num_rows], real, self.up, self.down, c.swiglu_limit, r)
        elif read is not None and isinstance(self.up, torch.Tensor) and isinstance(self.down, torch.Tensor):
            out[:num_rows] += run_experts(read, real, self.up, self.down, c.swiglu_limit, r, self.quantize)
        return r(out)
