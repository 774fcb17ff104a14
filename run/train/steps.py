"""Steps of a run, which depend on its plan, its seed and their number only; each on one batch, whatever is trained."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import distributed

from kernels.config import ModelConfig
from kernels.vocabulary import load_token_map
from run.train import tower
from run.train.layers import Weights
from run.train.optimizer import Optimizer
from run.train.packing import Batch, pack
from run.train.parameters import Parameters
from run.train.plan import Plan, fill
from run.train.rendering import Renderer, Sample
from run.train.seeds import rng
from run.train.tasks import TASKS

R = TypeVar("R", bound=NamedTuple)

_BALANCE = 2e-3
"""What a router's bias moves by in a step (spec §10 has 1e-3, over far more steps)."""
_CUT_SHARE = 0.15
"""Rows whose windows are cut somewhere, as encoder replay cuts them."""


class Steps(ABC, Generic[R]):
    """`folder` is a checkpoint, whose configuration and tokenizer are taken. Raises CardError, ConfigError.

    Where torch.distributed is initialised, each process computes its share of every batch's rows.
    """

    parameters: Parameters
    """What is trained."""
    frozen: Parameters
    """The rest of the model."""
    optimizer: Optimizer

    def __init__(self, folder: Path, plan: Plan, seed: int) -> None:
        spread = distributed.is_initialized()
        self.rank, self.world = (distributed.get_rank(), distributed.get_world_size()) if spread else (0, 1)
        self.config = ModelConfig.from_folder(folder)
        self.plan, self.seed, self.step = plan, seed, 0
        self.token_map = load_token_map(folder, self.config)
        self.renderer = Renderer(folder)
        self.frozen = {}

    @abstractmethod
    def _step(self, batch: Batch, stop: bool) -> tuple[R, bool]:
        """Train on `batch` and count the step; also, whether any process says `stop`."""

    def run(self, stop: Callable[[], bool]) -> Iterator[R]:
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
        samples, cuts = samples[self.rank :: self.world], cuts[self.rank :: self.world]
        return pack(samples, rows.columns, rows.region, self.token_map, cuts, self.config)

    def _sample(self, task: str, number: int, num_tokens: int) -> Sample:
        return self.renderer.render(TASKS[task](rng("train", task, number), num_tokens))

    def _images(self, weights: Weights, batch: Batch) -> torch.Tensor | None:
        """The rows of a batch's image tokens, None where there are none."""
        vision = self.config.vision
        return tower.encode(weights, vision, batch.images) if batch.images and vision is not None else None

    def _add_up(self, values: list[torch.Tensor]) -> None:
        """Replace each by the sum over all processes."""
        if self.world > 1:
            flat = torch.cat([value.flatten() for value in values])
            distributed.all_reduce(flat)
            parts = flat.split([value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                value.copy_(part.view_as(value))

    def _gradients(self, *, fill: bool) -> list[torch.Tensor]:
        """Of what is trained; with `fill` of all of it, zeros where this process had nothing to learn from: another one
        had, and all have to add up the same tensors."""
        trained = [self.parameters[name] for name in self.optimizer.trained]
        for value in trained if fill else ():
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        return [value.grad for value in trained if value.grad is not None]

    def state(self) -> dict[str, Any]:
        """All that the run goes on from."""
        parameters = {name: value.detach() for name, value in self.parameters.items()}
        return {"step": self.step, "seed": self.seed, "parameters": parameters, "optimizer": self.optimizer.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError for a run with another seed, or of another model."""
        if state["seed"] != self.seed:
            raise ValueError(f"this run was begun with seed {state['seed']}, not {self.seed}")
        if _shapes(state["parameters"]) != _shapes(self.parameters):
            raise ValueError("this run was begun with a model of other shapes: begin anew in another folder")
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.parameters[name].copy_(value)
        self.optimizer.load(state["optimizer"])
        self.step = state["step"]


def _shapes(parameters: Parameters) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in parameters.items()}


@torch.no_grad()
def balance(bias: torch.Tensor, load: torch.Tensor) -> None:
    """Prefer experts that were picked too seldom a little more: move the router's `bias` [E] by its `load` [E]."""
    if int(load.sum()):
        moved = (load.float().mean() - load).sign() * _BALANCE
        bias += moved - moved.mean()
