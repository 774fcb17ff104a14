"""DSpark's stages with gradients: blocks of drafts behind many columns of a batch at once (spec §8.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.config import ModelConfig
from kernels.ops.rope import frequencies
from run.train import attention
from run.train.anchors import Anchors
from run.train.layers import Turn, Weights, collapse, expand, experts, mix, norm, product, rotate


class Blocks(NamedTuple):
    """`hidden` [A, S, D] before the last norm; `loads` by stage, picks of each expert [E]."""

    hidden: torch.Tensor
    loads: dict[str, torch.Tensor]


class Stages:
    """The constants of a configuration; weights are given with each call."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.freqs = frequencies(config.qk_rope_head_dim, config.rope_theta, None)

    def forward(self, w: Weights, taps: Sequence[torch.Tensor], positions: torch.Tensor, anchors: Anchors) -> Blocks:
        """`taps` of the backbone, one [B, R, D] a target layer, at `positions` [B, R]."""
        c = self.config
        main = norm(product(torch.cat(list(taps), -1), w["mtp.0.main_proj.weight"]), w["mtp.0.main_norm.weight"])
        ids = torch.full_like(anchors.tokens[:, 1:], c.dspark_noise_token_id)
        ids[:, 0] = anchors.tokens[:, 0]
        shape = ids.shape
        turn = Turn.at(anchors.positions.unsqueeze(1) + 1 + torch.arange(shape[1]), self.freqs)
        main_turn = Turn.at(positions, self.freqs)
        streams = functional.embedding(ids.flatten(), w["embed.weight"]).float().unsqueeze(1).repeat(1, c.hc_mult, 1)
        pre = torch.zeros(len(streams), c.hc_mult)
        pre[:, 0] = 1.0
        loads = {}
        for role in c.draft_stages:
            name = role.name
            x = norm(collapse(streams, pre), w[f"{name}.attn_norm.weight"]).unflatten(0, shape)
            mixed = mix(streams, w, f"{name}.hc_attn", c.hc_eps, c.hc_sinkhorn_iters)
            y = self._attention(x, self._rows(main, w, name, main_turn), w, f"{name}.attn", turn, anchors)
            streams, pre = expand(y.flatten(0, 1), streams, mixed), mixed.pre
            mixed = mix(streams, w, f"{name}.hc_ffn", c.hc_eps, c.hc_sinkhorn_iters)
            x = norm(collapse(streams, pre), w[f"{name}.ffn_norm.weight"])
            bias = w[f"{name}.ffn.gate.bias"]
            y, picked = experts(x, w, f"{name}.ffn", bias, role.num_picks, c.routed_scaling_factor, c.swiglu_limit)
            loads[name] = picked.sum(0)
            streams, pre = expand(y, streams, mixed), mixed.pre
        return Blocks(collapse(streams, pre).unflatten(0, shape), loads)

    def head(self, w: Weights, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, vocab] and confidence [n], before the sigmoid, both fp32: of rows `hidden` [n, D] of blocks, with
        the token `before` [n] each."""
        last = self.config.draft_stages[-1].name
        memory = functional.embedding(before, w[f"{last}.markov_head.embed.weight"])
        logits = functional.linear(norm(hidden, w[f"{last}.norm.weight"]), w["head.weight"]).float()
        logits = logits + functional.linear(memory, w[f"{last}.markov_head.head.weight"])
        with torch.autocast("cpu", enabled=False):
            both = torch.cat((hidden.float(), memory), -1)
            return logits, functional.linear(both, w[f"{last}.confidence_head.proj.weight"]).squeeze(-1)

    def _rows(self, main: torch.Tensor, w: Weights, stage: str, turn: Turn) -> torch.Tensor:
        """What a stage's window keeps of the backbone: [B, R, D] -> [B R, head_dim]."""
        kv = norm(product(main, w[f"{stage}.attn.wkv.weight"]), w[f"{stage}.attn.kv_norm.weight"])
        return attention.window_values(kv, turn).flatten(0, 1)

    def _attention(
        self, x: torch.Tensor, rows: torch.Tensor, w: Weights, name: str, turn: Turn, anchors: Anchors
    ) -> torch.Tensor:
        """`x` [A, S, D], normed -> [A, S, D]. Each row of a block sees the window before it and the whole block."""
        _, q, kv = attention.project(x, w, name, self.config)
        num, size, heads, dim = q.shape
        block = attention.window_values(kv, turn)
        window = rows.index_select(0, anchors.window.flatten()).unflatten(0, anchors.window.shape)
        keys = torch.cat((window, block), 1)
        scores = torch.matmul((rotate(q, turn) * dim**-0.5).flatten(1, 2), keys.transpose(1, 2))
        bias = functional.pad(torch.where(anchors.seen, 0.0, attention.NEVER), (0, size)).unsqueeze(1)
        drain = w[f"{name}.attn_sink"].repeat(size).view(1, -1, 1).expand(num, -1, 1)
        share = torch.cat((scores + bias.to(scores.dtype), drain.to(scores.dtype)), -1).softmax(-1)[..., :-1]
        out = torch.matmul(share, keys.to(share.dtype)).unflatten(1, (size, heads))
        return attention.output(out, w, name, self.config, turn)
