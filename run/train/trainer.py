"""The training of backbone and image tower."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

from run.train.backbone import Backbone, Pass
from run.train.layers import Weights, norm, rounded_inputs
from run.train.optimizer import Optimizer
from run.train.packing import Batch
from run.train.parameters import as_stored, initial, is_draft
from run.train.plan import Plan, Stage
from run.train.steps import Steps, balance


class Report(NamedTuple):
    """`loss` and `right`: cross-entropy of the tokens wanted, and the share of them that the model would have said;
    `index_loss`: divergence of all indexers together; `guide_loss` of guided heads, on average."""

    step: int
    stage: str
    loss: float
    right: float
    index_loss: float
    guide_loss: float
    num_tokens: int
    took_s: float


class Trainer(Steps[Report]):
    """Draft stages are left as they begin."""

    def __init__(self, folder: Path, plan: Plan, seed: int) -> None:
        super().__init__(folder, plan, seed)
        self.backbone = Backbone(self.config, self.token_map.pad)
        self.parameters = initial(self.config, seed)
        drafts = frozenset(name for name in self.parameters if is_draft(name))
        self.optimizer = Optimizer(self.parameters, self.config, drafts)

    def _step(self, batch: Batch, stop: bool) -> tuple[Report, bool]:
        began = time.monotonic()
        stage, rate = self.plan.at(self.step)
        weights = as_stored(self.parameters, self.config)
        with rounded_inputs() if stage.rounded else contextlib.nullcontext():
            found, losses, right = self._loss(weights, batch, stage)
        index_loss = torch.stack(found.index_loss).sum() / self.world
        counts = len(batch.where), float(right), batch.tokens.numel(), len(batch.images)
        figures = torch.tensor([*counts, float(stop)])
        self._add_up([figures])
        loss = losses.sum() / figures[0]
        guide_loss = torch.stack(found.guide_loss).mean() if found.guide_loss else torch.zeros(())
        (loss + index_loss + stage.guide / self.world * guide_loss).backward()
        both = torch.stack((loss.detach(), index_loss.detach(), guide_loss.detach() / self.world))
        layers = sorted(found.loads)
        loads = torch.stack([found.loads[layer] for layer in layers]).float()
        num, num_right, num_tokens, num_images, stopped = figures.tolist()
        self._add_up([both, loads, *self._gradients(fill=num_images > 0)])
        self.optimizer.step(rate)
        self._balance(dict(zip(layers, loads, strict=True)))
        mean, index_mean, guide_mean = both.tolist()
        took_s = time.monotonic() - began
        report = Report(self.step, stage.name, mean, num_right / num, index_mean, guide_mean, int(num_tokens), took_s)
        self.step += 1
        return report, bool(stopped)

    def _loss(self, weights: Weights, batch: Batch, stage: Stage) -> tuple[Pass, torch.Tensor, torch.Tensor]:
        """The pass, the cross-entropy of each token wanted, and how many of them the model would have said."""
        with torch.autocast("cpu", torch.bfloat16):
            images = self._images(weights, batch)
            found = self.backbone.forward(
                weights, batch, images, select=stage.select, probe=self.step, guide=stage.guide > 0
            )
            hidden = norm(found.hidden.flatten(0, 1)[batch.where], weights["norm.weight"])
            logits = functional.linear(hidden, weights["head.weight"]).float()
        losses = functional.cross_entropy(logits, batch.wanted, reduction="none")
        return found, losses, (logits.argmax(-1) == batch.wanted).sum()

    def _balance(self, loads: dict[int, torch.Tensor]) -> None:
        for layer, (text, drawn) in loads.items():
            name = f"layers.{layer}.ffn.gate.bias"
            balance(self.parameters[name], text)
            balance(self.parameters[f"{name}_vl"], drawn)
