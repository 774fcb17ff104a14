"""The training of the draft stages, on a backbone that stays as it is (spec §8.3)."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from run.train.anchors import Anchors, choose
from run.train.backbone import Backbone, Pass
from run.train.layers import Weights, norm, rounded_inputs
from run.train.optimizer import Optimizer
from run.train.packing import Batch
from run.train.parameters import Parameters, as_stored, digest, initial, is_draft, read
from run.train.plan import Plan
from run.train.stages import Stages
from run.train.steps import Steps, balance

_MOST = 512
"""Blocks of a process's share of a batch."""
_CE, _DISTANCE, _SURE = 0.1, 0.9, 1.0


class DraftReport(NamedTuple):
    """`distance` is |p_d - p_t|, 0 to 2, `accepted` the length of greedy blocks with the target's own token; both
    behind true tokens, blocks at an answer's end among them."""

    step: int
    stage: str
    loss: float
    distance: float
    accepted: float
    num_tokens: int
    took_s: float


class Losses(NamedTuple):
    """Of each draft: cross-entropy with the true token, distance |p_d - p_t| of what draft and target would say, and
    the cross-entropy of the confidence with 1 - distance / 2, how likely the draft is accepted."""

    token: torch.Tensor
    distance: torch.Tensor
    sure: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return _CE * self.token + _DISTANCE * self.distance + _SURE * self.sure


def losses(logits: torch.Tensor, confidence: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor) -> Losses:
    """`logits` [n, vocab], `confidence` [n] before the sigmoid, `target` [n, vocab] probabilities, `tokens` [n]."""
    distance = (logits.softmax(-1) - target).abs().sum(-1)
    sure = functional.binary_cross_entropy_with_logits(confidence, 1 - distance.detach() / 2, reduction="none")
    return Losses(functional.cross_entropy(logits, tokens, reduction="none"), distance, sure)


def place_weights(size: int) -> torch.Tensor:
    """What drafts count by their place in a block: a later one is of use only when all before it are right."""
    return torch.exp(-torch.arange(size) / size)


class DraftTrainer(Steps[DraftReport]):
    """Raises CheckpointError too: the backbone is read from `folder`, and computed as it is served.

    Drafts are conditioned on the tokens of the conversations, which a trained model would say itself.
    """

    def __init__(self, folder: Path, plan: Plan, seed: int) -> None:
        super().__init__(folder, plan, seed)
        self.backbone, self.stages = Backbone(self.config, self.token_map.pad), Stages(self.config)
        begun = initial(self.config, seed)
        self.frozen = {name: value for name, value in read(folder, self.config).items() if not is_draft(name)}
        self.parameters: Parameters = {name: value for name, value in begun.items() if is_draft(name)}
        self.optimizer = Optimizer(self.parameters, self.config)
        self.weights = place_weights(self.config.dspark_block_size)

    def _step(self, batch: Batch, stop: bool) -> tuple[DraftReport, bool]:
        began = time.monotonic()
        stage, rate = self.plan.at(self.step)
        c, draw = self.config, random.Random(f"{self.seed}/{self.step}/{self.rank}")
        anchors = choose(batch, c.dspark_block_size, c.sliding_window, _MOST, draw)
        with rounded_inputs() if stage.rounded else contextlib.nullcontext():
            weights = {**self.frozen, **as_stored(self.parameters, c)}
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                found = self._observe(batch, select=stage.select)
                target = self._target(found, anchors)
            each, right, loads = self._draft(weights, batch, found, anchors, target)
        weight = self.weights.expand_as(anchors.counted)[anchors.counted]
        counts = len(anchors.place), int(anchors.counted.sum()), right, batch.tokens.numel()
        figures = torch.tensor([float(weight.sum()), float(each.distance.detach().sum()), *counts, float(stop)])
        self._add_up([figures])
        all_weight, distance, num_blocks, num_drafts, num_right, num_tokens, stopped = figures.tolist()
        loss = (each.total * weight).sum() / max(all_weight, 1e-9)
        loss.backward()
        mean = loss.detach().clone()
        picks = [load.float() for load in loads.values()]
        self._add_up([mean, *picks, *self._gradients(fill=True)])  # there may be nothing to draft
        self.optimizer.step(rate)
        for name, load in zip(loads, picks, strict=True):
            balance(self.parameters[f"{name}.ffn.gate.bias"], load)
        report = DraftReport(
            self.step,
            stage.name,
            float(mean),
            distance / max(num_drafts, 1),
            1 + num_right / max(num_blocks, 1),
            int(num_tokens),
            time.monotonic() - began,
        )
        self.step += 1
        return report, bool(stopped)

    def _observe(self, batch: Batch, *, select: bool) -> Pass:
        images = self._images(self.frozen, batch)
        return self.backbone.forward(self.frozen, batch, images, select=select, probe=self.step)

    def _target(self, found: Pass, anchors: Anchors) -> torch.Tensor:
        """What the backbone would say in the place of each draft that counts: probabilities [n, vocab]."""
        places = anchors.place.unsqueeze(1) + 1 + torch.arange(anchors.counted.shape[1])
        hidden = norm(found.hidden.flatten(0, 1)[places[anchors.counted]], self.frozen["norm.weight"])
        return functional.linear(hidden, self.frozen["head.weight"]).float().softmax(-1)

    def _draft(
        self, weights: Weights, batch: Batch, found: Pass, anchors: Anchors, target: torch.Tensor
    ) -> tuple[Losses, int, dict[str, torch.Tensor]]:
        """Losses of the drafts that count, how many of them are right with all before them, and loads of experts."""
        taps = [tap[:, -batch.region :] for tap in found.taps]
        positions = batch.positions[:, -batch.region :]
        with torch.autocast("cpu", torch.bfloat16):
            blocks = self.stages.forward(weights, taps, positions, anchors)
            before, tokens = anchors.tokens[:, :-1], anchors.tokens[:, 1:]
            hidden = blocks.hidden[anchors.counted]
            logits, confidence = self.stages.head(weights, hidden, before[anchors.counted])
        is_right = torch.zeros_like(anchors.counted)
        is_right[anchors.counted] = logits.argmax(-1) == target.argmax(-1)
        each = losses(logits, confidence, target, tokens[anchors.counted])
        return each, int(is_right.cumprod(1).sum()), blocks.loads

    def state(self) -> dict[str, Any]:
        return {**super().state(), "backbone": digest(self.frozen)}

    def load(self, state: dict[str, Any]) -> None:
        """Raises ValueError also where the backbone is not the one that the drafts were begun on."""
        if state["backbone"] != digest(self.frozen):
            raise ValueError("the backbone was trained since these drafts were begun: delete drafts.pt to begin anew")
        super().load(state)
