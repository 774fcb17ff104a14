"""DSpark: three stages that read the backbone's taps and propose a block of tokens at once (spec §8.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.attention import Attention
from kernels.batch import Segment
from kernels.block import Block
from kernels.cache import StatePool
from kernels.checkpoint import Checkpoint
from kernels.config import ModelConfig
from kernels.engine import Sampling
from kernels.group import Group
from kernels.layout import Layout
from kernels.ops.attention import KeySet, sparse_attend
from kernels.ops.linear import by_columns, linear
from kernels.ops.mix import collapse
from kernels.ops.pack import window_rows, window_values
from kernels.ops.rope import Rotation, frequencies, rotate_
from kernels.ops.rounding import Rounding, rms_norm
from kernels.projection import Projection
from kernels.step import Step
from kernels.verify import sample_rows


class Drafts(NamedTuple):
    """For each request a block of proposals, each for the position behind the one before.

    `tokens` [requests, block] int64; `logits` [requests, block, vocab] fp32, what they were sampled from;
    `confidence` [requests, block] fp32, before the sigmoid: how likely the target agrees, given that it agreed so far.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor


class DraftAttention(Attention):
    """Each row of a block sees the same keys: the stage's window before the block, and the whole block."""

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, rotation: Rotation, step: Step) -> torch.Tensor:
        layout = step.layout
        group, before = layout.groups[0], layout.before
        ring = step.pool.draft_swa[self.role.layer - self.config.num_hidden_layers].flatten(0, 1)
        num, length, dim = group.num_segments, group.length, self.config.head_dim
        window = window_values(ring[before.rows.flatten()]).view(num, -1, dim)
        block = window_values(kv[: layout.num_rows]).view(num, length, dim)
        key_sets = [
            KeySet(self._shared(window, length), before.bias.repeat_interleave(length, 0)),
            KeySet(self._shared(block, length), torch.zeros(layout.num_rows, length, device=q.device)),
        ]
        rows, scale = slice(layout.num_rows), self.config.head_dim**-0.5
        out = sparse_attend(q[rows], (), key_sets, self.sink, scale, rotation.of(rows), self.round)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, layout.padded - layout.num_rows))

    @staticmethod
    def _shared(keys: torch.Tensor, length: int) -> torch.Tensor:
        """`keys` [segments, num_keys, dim] for each of the `length` rows of a segment."""
        return keys.unsqueeze(1).expand(-1, length, -1, -1)


class Drafter:
    """Weights of `mtp.*`, with the backbone's `embed` and `head` [vocab, dim]. Immutable."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        embed: torch.Tensor,
        head: torch.Tensor,
        rounding: Rounding,
        group: Group | None,
    ) -> None:
        self.config, self.embed, self.head, self.round = config, embed, head, rounding
        c, last = config, config.draft_stages[-1].name
        dim, rank = c.hidden_size, c.dspark_markov_rank
        self.main_proj = Projection(checkpoint.matrix("mtp.0.main_proj", dim, len(c.dspark_target_layer_ids) * dim))
        self.main_norm = checkpoint.tensor("mtp.0.main_norm.weight", dim)
        # Here the stages read one input, so it is one product, beside those that their blocks go through.
        names = [f"{role.name}.attn.wkv" for role in c.draft_stages]
        self.stage_kv = Projection(*(checkpoint.matrix(name, c.head_dim, dim) for name in names))
        self.attentions: list[DraftAttention] = []
        self.stages: list[Block] = []
        for role in c.draft_stages:
            self.attentions.append(DraftAttention(c, role, checkpoint, rounding))
            self.stages.append(Block(c, role, checkpoint, rounding, self.attentions[-1], group))
        self.norm = checkpoint.tensor(f"{last}.norm.weight", dim)
        self.markov_embed = checkpoint.tensor(f"{last}.markov_head.embed.weight", c.vocab_size, rank)
        self.markov_head = by_columns(checkpoint.tensor(f"{last}.markov_head.head.weight", c.vocab_size, rank))
        self.confidence = checkpoint.tensor(f"{last}.confidence_head.proj.weight", 1, dim + rank)
        self.freqs = frequencies(c.qk_rope_head_dim, c.rope_theta, None).to(checkpoint.device)

    @np.errstate(all="ignore")
    def observe(self, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the stages' windows keep of the backbone: `taps` [rows, targets * dim], those of each row side by side,
        unrounded, at `positions` [rows] -> [stages, rows, ..]."""
        r, eps = self.round, self.config.rms_norm_eps
        x = rms_norm(r(self.main_proj.forward(r(taps))[0]), self.main_norm, eps, r)
        parts = zip(self.stage_kv.forward(x), self.attentions, strict=True)
        kv = torch.stack([rms_norm(r(part), attention.kv_norm, eps, r) for part, attention in parts], 1)
        kv = r(rotate_(kv, Rotation.at(positions, self.freqs))).transpose(0, 1)
        return window_rows(kv.reshape(-1, kv.shape[-1])).view(*kv.shape[:2], -1)

    @np.errstate(all="ignore")  # weights that are no good show in the logits, which sampling refuses
    @torch.inference_mode()
    def draft(
        self,
        runs: Sequence[tuple[int, int]],
        samplings: Sequence[Sampling],
        pool: StatePool,
        trace: dict[str, torch.Tensor] | None = None,
    ) -> Drafts:
        """Proposals behind the `(slot, token)` of `runs`, the token being sampled and not yet computed.

        Draws with the noise that the target will use at the same positions. Changes no state in `pool`. Raises
        ValueError when a slot is empty or the pool keeps no draft windows.
        """
        c, size = self.config, self.config.dspark_block_size
        if pool.taps is None:
            raise ValueError("the pool keeps no draft windows")
        segments = [Segment(slot, pool.length(slot), size) for slot, _ in runs]
        if not all(segment.start for segment in segments):
            raise ValueError("a draft needs at least one computed token")
        pool.settle([segment.slot for segment in segments])
        layout = Layout(segments, pool)
        rotation = Rotation.at(layout.positions, self.freqs)
        step = Step(layout, pool, rotation, rotation, trace)
        noise = [c.dspark_noise_token_id] * (size - 1)
        ids = torch.tensor([[token, *noise] for _, token in runs], device=pool.device)
        padded = torch.nn.functional.pad(ids.flatten(), (0, layout.padded - layout.num_rows))
        streams = self.embed[padded].unsqueeze(1).repeat(1, c.hc_mult, 1)
        pre = torch.zeros(layout.padded, c.hc_mult, device=pool.device)
        pre[:, 0] = 1.0
        for stage in self.stages:
            streams, pre = stage.forward(streams, stage.project(streams, pre, step), step)
        hidden = collapse(streams, pre, self.round)[: layout.num_rows]
        return self._propose(hidden.view(len(runs), size, -1), ids[:, 0], segments, samplings)

    def serve(self) -> None:
        """Take part in a `draft` of other ranks."""
        for stage in self.stages:
            stage.moe.experts.serve()

    def _propose(
        self, hidden: torch.Tensor, tokens: torch.Tensor, segments: Sequence[Segment], samplings: Sequence[Sampling]
    ) -> Drafts:
        """One token after another: each adds the bias of the one before it, [requests] `tokens` for the first."""
        num, size, dim = hidden.shape
        normed = rms_norm(hidden.reshape(-1, dim), self.norm, self.config.rms_norm_eps, self.round)
        logits = linear(normed, self.head).view(num, size, -1)
        starts = torch.tensor([segment.start for segment in segments], device=hidden.device)
        drafts, confidence = [], []
        for place in range(size):
            bias = self.markov_embed[tokens]
            logits[:, place] += linear(bias, self.markov_head)
            confidence.append((torch.cat((hidden[:, place], bias), 1) * self.confidence).sum(-1))
            # What are no numbers are bad proposals, not an error: the target tells whose request that is.
            tokens = sample_rows(logits[:, place].nan_to_num(), samplings, starts + place + 1)
            drafts.append(tokens)
        return Drafts(torch.stack(drafts, 1), logits, torch.stack(confidence, 1))
