"""Steps of a training run of backbone and image tower. They depend on the plan, the seed and their number only."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.nn import functional

from kernels.config import ModelConfig
from kernels.vocabulary import load_token_map
from run.train import tower
from run.train.backbone import Backbone, Pass
from run.train.layers import Weights, norm, rounded_inputs
from run.train.optimizer import Optimizer
from run.train.packing import Batch, pack
from run.train.parameters import Parameters, as_stored, initial
from run.train.plan import Plan, Stage, fill
from run.train.rendering import Renderer, Sample
from run.train.seeds import rng
from run.train.tasks import TASKS

_BALANCE = 2e-3
"""What a router's bias moves by in a step (spec §10 has 1e-3, over far more steps)."""
_CUT_SHARE = 0.15
"""Rows whose windows are cut somewhere, as encoder replay cuts them."""


class Report(NamedTuple):
    step: int
    stage: str
    loss: float
    right: float
    index_loss: float
    num_tokens: int
    took_s: float


class Trainer:
    """`folder` is a checkpoint, whose configuration and tokenizer are taken. Raises CardError, ConfigError.

    Where torch.distributed is initialised, each process computes its share of every batch's rows.
    """

    def __init__(self, folder: Path, plan: Plan, seed: int) -> None:
        spread = distributed.is_initialized()
        self.rank, self.world = (distributed.get_rank(), distributed.get_world_size()) if spread else (0, 1)
        self.config = ModelConfig.from_folder(folder)
        self.plan, self.seed, self.step = plan, seed, 0
        self.token_map = load_token_map(folder, self.config)
        self.renderer = Renderer(folder)
        self.backbone = Backbone(self.config, self.token_map.pad)
        self.parameters: Parameters = initial(self.config, seed)
        drafts = frozenset(name for name in self.parameters if name.startswith("mtp."))
        self.optimizer = Optimizer(self.parameters, self.config, drafts)

    def run(self, stop: Callable[[], bool]) -> Iterator[Report]:
        """Steps, the next batch being made meanwhile, until the plan ends or a process says `stop`."""
        with ThreadPoolExecutor(1) as maker:
            coming = maker.submit(self.batch, self.step)
            stopped = False
            while self.step < self.plan.num_steps and not stopped:
                batch = coming.result()
                coming = maker.submit(self.batch, min(self.step + 1, self.plan.num_steps - 1))
                report, stopped = self._step(batch, stop())
                yield report

    def batch(self, step: int) -> Batch:
        """The batch of a step: the same for the same plan and seed."""
        stage, _ = self.plan.at(step)
        draw = random.Random(f"{self.seed}/{step}")
        rows, samples = fill(stage, draw, step * 1_000_000, self._sample)
        cuts = [draw.randrange(8, rows.columns, 8) if draw.random() < _CUT_SHARE else None for _ in samples]
        assert self.config.image_token_id is not None
        samples, cuts = samples[self.rank :: self.world], cuts[self.rank :: self.world]
        return pack(samples, rows.columns, rows.region, self.token_map, cuts, self.config.image_token_id)

    def _sample(self, task: str, number: int, num_tokens: int) -> Sample:
        return self.renderer.render(TASKS[task](rng("train", task, number), num_tokens))

    def _step(self, batch: Batch, stop: bool) -> tuple[Report, bool]:
        began = time.monotonic()
        stage, rate = self.plan.at(self.step)
        weights = as_stored(self.parameters, self.config)
        with rounded_inputs() if stage.rounded else contextlib.nullcontext():
            found, losses, right = self._loss(weights, batch, stage)
        index_loss = torch.stack(found.index_loss).sum() / self.world
        figures = torch.tensor([len(batch.where), float(right), batch.tokens.numel(), float(stop)])
        self._add_up([figures])
        loss = losses.sum() / figures[0]
        (loss + index_loss).backward()
        both = torch.stack((loss.detach(), index_loss.detach()))
        layers = sorted(found.loads)
        loads = torch.stack([found.loads[layer] for layer in layers]).float()
        grads = [self.parameters[name].grad for name in self.optimizer.trained]
        self._add_up([both, loads, *(grad for grad in grads if grad is not None)])
        self.optimizer.step(rate)
        self._balance(dict(zip(layers, loads, strict=True)))
        num, num_right, num_tokens, stopped = figures.tolist()
        mean, index_mean = both.tolist()
        took_s = time.monotonic() - began
        report = Report(self.step, stage.name, mean, num_right / num, index_mean, int(num_tokens), took_s)
        self.step += 1
        return report, bool(stopped)

    def _add_up(self, values: list[torch.Tensor]) -> None:
        """Replace each by the sum over all processes."""
        if self.world > 1:
            flat = torch.cat([value.flatten() for value in values])
            distributed.all_reduce(flat)
            parts = flat.split([value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                value.copy_(part.view_as(value))

    def _loss(self, weights: Weights, batch: Batch, stage: Stage) -> tuple[Pass, torch.Tensor, torch.Tensor]:
        """The pass, the cross-entropy of each token wanted, and how many of them the model would have said."""
        with torch.autocast("cpu", torch.bfloat16):
            vision = self.config.vision
            images = tower.encode(weights, vision, batch.images) if batch.images and vision is not None else None
            found = self.backbone.forward(weights, batch, images, select=stage.select, probe=self.step)
            hidden = norm(found.hidden.flatten(0, 1)[batch.where], weights["norm.weight"])
            logits = functional.linear(hidden, weights["head.weight"]).float()
        losses = functional.cross_entropy(logits, batch.wanted, reduction="none")
        return found, losses, (logits.argmax(-1) == batch.wanted).sum()

    @torch.no_grad()
    def _balance(self, loads: dict[int, torch.Tensor]) -> None:
        """Experts that were picked too seldom are preferred a little more: their bias grows, by text and by images."""
        for layer, (text, drawn) in loads.items():
            name = f"layers.{layer}.ffn.gate.bias"
            for ending, load in (("", text), ("_vl", drawn)):
                if int(load.sum()):
                    moved = (load.float().mean() - load).sign() * _BALANCE
                    self.parameters[name + ending] += moved - moved.mean()

    def state(self) -> dict[str, Any]:
        """All that the run goes on from."""
        parameters = {name: value.detach() for name, value in self.parameters.items()}
        return {"step": self.step, "seed": self.seed, "parameters": parameters, "optimizer": self.optimizer.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError for a run with another seed."""
        if state["seed"] != self.seed:
            raise ValueError(f"this run was begun with seed {state['seed']}, not {self.seed}")
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.parameters[name].copy_(value)
        self.optimizer.load(state["optimizer"])
        self.step = state["step"]
