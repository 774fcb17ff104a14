"""A run on disk: what it goes on from, its log, and its model in the official layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from run.checkpoint import DEFAULT_SEED, make
from run.train.trainer import Report


class RunFolder:
    """`state.pt`, `log.jsonl` and `model/`, which is a checkpoint like any other, in `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"

    def prepare(self) -> None:
        """Make what a new run begins with: a model, untrained, with its tokenizer."""
        if not (self.model / "model.safetensors").exists():
            make(self.model, DEFAULT_SEED)

    def load(self) -> dict[str, Any] | None:
        """The last state, or None before the first."""
        path = self.path / "state.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the last state at once or not at all."""
        part = self.path / "state.part"
        torch.save(state, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(self.path / "state.pt")

    def log(self, reports: list[Report]) -> None:
        """Append the mean of some steps."""
        num, last = len(reports), reports[-1]
        row = {
            "step": last.step + 1,
            "stage": last.stage,
            "loss": round(sum(one.loss for one in reports) / num, 4),
            "right": round(sum(one.right for one in reports) / num, 4),
            "index_loss": round(sum(one.index_loss for one in reports) / num, 4),
            "num_tokens": sum(one.num_tokens for one in reports),
            "took_s": round(sum(one.took_s for one in reports), 1),
        }
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def truncate_log(self, step: int) -> None:
        """Drop what was logged behind the state that the run goes on from."""
        path = self.path / "log.jsonl"
        if path.exists():
            lines = path.read_text().splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            path.write_text("".join(f"{line}\n" for line in kept))
