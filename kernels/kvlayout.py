"""Sizes of all cached state in bytes, from the configuration alone, and the order of a block's payload (spec §6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.config import LayerRole, ModelConfig
from kernels.engine import BLOCK_TOKENS
from kernels.ops.pack import Record

_FP32_BYTES = 4


@dataclass(frozen=True)
class KVLayout:
    """What the published model keeps of a request.

    The payload of a block of 128 tokens is, for each KV owner in order, its main records, then its index records:
    `rows(owner)` each, in order of position. Nothing lies between them.
    """

    config: ModelConfig

    @property
    def main_bytes(self) -> int:
        """Of one compressed row: codes, then scales."""
        return Record.MAIN.row_bytes(self.config.head_dim)

    @property
    def index_bytes(self) -> int:
        """Of one index key."""
        return Record.INDEX.row_bytes(self.config.index_head_dim)

    @property
    def window_bytes(self) -> int:
        """Of one sliding-window row."""
        return Record.WINDOW.row_bytes(self.config.head_dim)

    @property
    def block_bytes(self) -> int:
        """Of one block's payload."""
        return sum(rows * row_bytes for _, rows, row_bytes in self._parts())

    @property
    def token_bytes(self) -> float:
        """Of global KV per token."""
        return self.block_bytes / BLOCK_TOKENS

    @property
    def swa_bytes(self) -> int:
        """Of the backbone's windows, per request."""
        return self.config.num_hidden_layers * self.config.sliding_window * self.window_bytes

    @property
    def draft_swa_bytes(self) -> int:
        """Of the draft stages' windows, per request."""
        return self.config.num_nextn_predict_layers * self.config.sliding_window * self.window_bytes

    @property
    def pair_bytes(self) -> int:
        """Of the FP32 (kv, score) of two tokens in each ratio-2 owner, per request."""
        owners = sum(role.ratio == 2 for role in self.config.kv_owners)
        return owners * 2 * 2 * self.config.head_dim * _FP32_BYTES

    def index_scan_bytes(self, num_tokens: int) -> int:
        """Index keys that a decode step reads at a context of `num_tokens`: all, or the candidates."""
        c = self.config
        rows = 0
        for role in c.layers:
            if role.owns_index:
                visible = num_tokens // role.ratio
                narrowed = role.mode == "reindex" and role.kv_owner == c.candidate_source_layer_id
                rows += min(visible, c.candidate_topk_blocks * c.candidate_block_size) if narrowed else visible
        return rows * self.index_bytes

    def rows(self, role: LayerRole) -> int:
        """Compressed rows of a KV owner in one block."""
        return BLOCK_TOKENS // role.ratio

    def join(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Records of whole blocks, `main.{layer}` and `index_k.{layer}` uint8 [rows, row bytes] of each owner in order
        of position, to payloads: uint8 [blocks, block_bytes]."""
        return torch.cat(
            [tensors[name].reshape(-1, rows * row_bytes) for name, rows, row_bytes in self._parts()], 1
        )

    def split(self, payloads: torch.Tensor) -> dict[str, torch.Tensor]:
        """What `join` made `payloads` uint8 [blocks, block_bytes] of. Raises ValueError for other sizes."""
        if payloads.ndim != 2 or payloads.shape[1] != self.block_bytes or payloads.dtype != torch.uint8:
            raise ValueError(f"payloads are {payloads.dtype} {list(payloads.shape)}, expected [.., {self.block_bytes}]")
        parts = payloads.split_with_sizes([rows * row_bytes for _, rows, row_bytes in self._parts()], 1)
        return {
            name: part.reshape(-1, row_bytes) for (name, _, row_bytes), part in zip(self._parts(), parts, strict=True)
        }

    def _parts(self) -> list[tuple[str, int, int]]:
        """Name, rows per block and bytes per row of what a payload consists of, in order."""
        return [
            (f"{name}.{role.layer}", self.rows(role), row_bytes)
            for role in self.config.kv_owners
            for name, row_bytes in (("main", self.main_bytes), ("index_k", self.index_bytes))
        ]
