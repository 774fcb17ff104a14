"""The chooser of compressed rows: scores, hierarchical candidates, picks (spec §4.3, §4.4)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint
from kernels.config import LayerRole, ModelConfig
from kernels.engine import BLOCK_TOKENS
from kernels.ops import index
from kernels.ops.attention import PICK_TILE, Source, picked
from kernels.ops.quant import fp4_e8m0_qdq
from kernels.ops.rope import rotate_quantize
from kernels.ops.rounding import Rounding
from kernels.step import Step


class Indexer:
    """Weights of the query side of `attn.indexer`, in a layer that owns its picks."""

    def __init__(self, config: ModelConfig, role: LayerRole, checkpoint: Checkpoint, rounding: Rounding) -> None:
        assert role.kv_owner is not None
        self.config, self.role, self.round, self.kv_owner = config, role, rounding, role.kv_owner
        c, name = config, f"layers.{role.layer}.attn.indexer"
        self.queries = checkpoint.matrix(f"{name}.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self.head_weights = checkpoint.matrix(f"{name}.weights_proj", c.index_n_heads, c.hidden_size)
        self.scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        self.writes_candidates = role.layer == c.candidate_source_layer_id
        self.reads_candidates = not self.writes_candidates and role.kv_owner == c.candidate_source_layer_id

    def forward(self, queries: torch.Tensor, weights: torch.Tensor, step: Step) -> list[Source]:
        """Pick rows for every batch row: per group the rows of the main cache.

        `queries` [padded rows, heads * dim] rounded but not rotated, `weights` [padded rows, heads] as projected.
        """
        c, r, layout = self.config, self.round, step.layout
        if self.writes_candidates:
            step.candidates = [None] * len(layout.groups)
        visible = layout.visible(self.role.ratio)
        q = queries.view(queries.shape[0], c.index_n_heads, c.index_head_dim)
        q = rotate_quantize(q, step.compressed, fp4_e8m0_qdq, r)
        weights = r(r(weights) * self.scale)
        main = step.pool.kv.main[self.kv_owner]
        sources, traced = [], []
        for number, group in enumerate(layout.groups):
            rows = group.rows
            most = group.end_position // self.role.ratio
            if most <= c.index_topk and step.trace is None:
                picks = index.all_rows(visible[rows], c.index_topk)
            else:
                picks = self._pick(q[rows], weights[rows], visible[rows], number, step)
                traced.append(picks if group.real is None else picks[group.real])
            # Whole tiles only, and none that no row of the batch fills.
            columns = -(-most // PICK_TILE) * PICK_TILE
            sources.append(picked(main, group.tables[:, : self._num_blocks(most)], picks[:, :columns]))
        if step.trace is not None:
            step.record(f"index.layers.{self.role.layer}.topk", torch.cat(traced))
        return sources

    def _num_blocks(self, num_rows: int) -> int:
        """Blocks of whole key tiles that hold `num_rows` compressed rows, at least one tile."""
        return max(-(-num_rows // index.KEY_TILE), 1) * (index.KEY_TILE * self.role.ratio // BLOCK_TOKENS)

    def _pick(
        self, q: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor, number: int, step: Step
    ) -> torch.Tensor:
        """The best rows for the rows of group `number`: [rows, topk]."""
        group, name = step.layout.groups[number], f"index.layers.{self.role.layer}"
        tables = group.tables[:, : self._num_blocks(group.end_position // self.role.ratio)]
        cache = index.Cache(step.pool.kv.index_k[self.kv_owner], tables)
        mask = step.candidates[number] if self.reads_candidates else None
        values = index.cached_scores(q, weights, cache, visible, mask, self.round)
        c = self.config
        if self.writes_candidates and values.shape[1] > c.candidate_topk_blocks * c.candidate_block_size:
            mask = index.candidate_mask(values, visible, c.candidate_block_size, c.candidate_topk_blocks)
            step.candidates[number] = mask
            step.record(f"{name}.candidate_mask", mask)
        if len(step.layout.groups) == 1:
            step.record(f"{name}.scores", values)
        return index.top_rows(values, visible, c.index_topk)
