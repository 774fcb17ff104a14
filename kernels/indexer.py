"""The chooser of compressed rows: scores, hierarchical candidates, picks, gathered keys (spec §4.3, §4.4)."""

from __future__ import annotations

import torch

from kernels.checkpoint import Checkpoint
from kernels.config import LayerRole, ModelConfig
from kernels.layout import Group
from kernels.ops import index
from kernels.ops.attention import KeySet
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

    def forward(self, queries: torch.Tensor, weights: torch.Tensor, step: Step) -> tuple[KeySet, ...]:
        """Pick rows for every batch row and gather them.

        `queries` [padded rows, heads * dim] rounded but not rotated, `weights` [padded rows, heads] as projected.
        """
        c, r, layout = self.config, self.round, step.layout
        if self.writes_candidates:
            step.candidates = [None] * len(layout.groups)
        visible = layout.visible(self.role.ratio)
        q = queries.view(queries.shape[0], c.index_n_heads, c.index_head_dim)
        q = rotate_quantize(q, step.compressed, fp4_e8m0_qdq, r)
        weights = r(r(weights) * self.scale)
        picks = []
        for number, group in enumerate(layout.groups):
            rows = slice(group.start, group.end)
            most = group.end_position // self.role.ratio
            if most <= c.index_topk and step.trace is None:
                picks.append(index.all_rows(visible[rows], c.index_topk))
                continue
            values = self._scores(q[rows], weights[rows], most, group, step)
            index.hide(values, visible[rows])
            self._apply_candidates(values, visible[rows], number, step)
            picks.append(index.top_rows(values, visible[rows], c.index_topk))
            if len(layout.groups) == 1:
                step.record(f"index.layers.{self.role.layer}.scores", values)
        picked = picks[0] if len(picks) == 1 else torch.cat(picks)
        step.record(f"index.layers.{self.role.layer}.topk", picked)
        most = max(group.end_position for group in layout.groups) // self.role.ratio
        return self._gather(picked, min(most, c.index_topk), step)

    def _scores(
        self, q: torch.Tensor, weights: torch.Tensor, most: int, group: Group, step: Step
    ) -> torch.Tensor:
        """Scores of whole key tiles, as many as hold the `most` visible rows: [rows, tiles * KEY_TILE]."""
        cache = step.pool.index_k[self.kv_owner]
        tiles = range(0, max(most, 1), index.KEY_TILE)
        values = torch.full((q.shape[0], len(tiles) * index.KEY_TILE), -torch.inf)
        for start in tiles:
            keys = cache[group.slots, start : start + index.KEY_TILE].to(q.dtype)
            each = keys.unsqueeze(1).expand(-1, group.length, -1, -1).reshape(q.shape[0], *keys.shape[1:])
            # In one segment the first rows of a chunk do not reach the later tiles.
            skip = max(0, start * self.role.ratio - group.start_position) if group.num_segments == 1 else 0
            columns = slice(start, start + index.KEY_TILE)
            values[skip:, columns] = index.scores(q[skip:], weights[skip:], each[skip:], self.round)
        return values

    def _apply_candidates(self, values: torch.Tensor, visible: torch.Tensor, number: int, step: Step) -> None:
        c = self.config
        if self.writes_candidates and values.shape[1] > c.candidate_topk_blocks * c.candidate_block_size:
            mask = index.candidate_mask(values, visible, c.candidate_block_size, c.candidate_topk_blocks)
            step.candidates[number] = mask
            step.record(f"index.layers.{self.role.layer}.candidate_mask", mask)
        mask_read = step.candidates[number] if self.reads_candidates else None
        if mask_read is not None:
            values.masked_fill_(~mask_read, -torch.inf)

    def _gather(self, picks: torch.Tensor, most: int, step: Step) -> tuple[KeySet, ...]:
        """The picked rows of the main cache in fixed tiles; a tile that no row of the batch fills is left out."""
        cache = step.pool.main[self.kv_owner]
        base = (step.layout.slots * cache.shape[1]).unsqueeze(1)
        flat = cache.flatten(0, 1)
        key_sets = []
        for start in range(0, most, index.PICK_TILE):
            tile = picks[:, start : start + index.PICK_TILE]
            keys = flat.index_select(0, (tile.clamp(min=0) + base).reshape(-1)).to(torch.float32)
            bias = torch.zeros(tile.shape).masked_fill_(tile < 0, -torch.inf)
            key_sets.append(KeySet(keys.view(*tile.shape, -1), bias))
        return tuple(key_sets)
