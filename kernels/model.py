"""The backbone: embedding, blocks, head."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.config import ModelConfig

ComputeDtype = Literal["fp32", "bf16"]


class Model:
    """A loaded V4.1 text backbone; immutable, so one instance may serve any number of pools."""

    config: ModelConfig

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: StatePool, trace: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Compute the batch, write its state into `pool` (whose lengths advance), return the wanted rows.

        Returns fp32 `[len(batch.rows), hidden_size]`: the collapsed residual before the final norm and head.
        Every row is bitwise the same whatever else is in the batch and however the prompt is cut into segments.
        `trace`, when given, is filled with intermediate tensors under the names of the golden data.
        Raises ValueError when a segment does not continue its slot's state or exceeds `pool.max_tokens`.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden_size]` rows of `forward` -> `[n, vocab_size]` fp32, row by row independent."""
        raise NotImplementedError


def load_model(folder: str | Path, *, compute_dtype: ComputeDtype = "fp32") -> Model:
    """Load a checkpoint folder. Raises ConfigError or CheckpointError."""
    raise NotImplementedError
