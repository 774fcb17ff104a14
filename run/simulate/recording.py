"""What a model's router does on the training tasks: run here, kept as a small file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.config import ModelConfig
from kernels.model import Model
from kernels.vision import load_vision
from run.evaluate.decoding import open_model
from run.evaluate.prompts import prompt_end
from run.evaluate.questions import OTHER_TOKENS
from run.simulate.routing import Picks, Recorded, alike, shares
from run.train.rendering import Renderer, Sample
from run.train.seeds import rng
from run.train.tasks import HELD_OUT

NUM_EXAMPLES = 40
DIGITS = 4


def record(folder: Path, num: int = NUM_EXAMPLES, told: Callable[[str], None] = lambda task: None) -> Recorded:
    """The routing of the model in `folder` for `num` held-out examples of each task, with the right answers: of the
    rows that decode would compute. `told` each task as it begins.

    Raises OSError and ValueError where the folder is no checkpoint.
    """
    model, renderer = open_model(folder), Renderer(folder)
    tower = load_vision(folder) if ModelConfig.from_folder(folder).vision is not None else None
    layers = model.config.layers
    found: dict[str, list[list[Picks]]] = {}
    for task, make in HELD_OUT.items():
        told(task)
        samples = [renderer.render(make(rng("held-out", task, index), OTHER_TOKENS)) for index in range(num)]
        requests = [
            picks(model, sample, [(at, tower.encode(pixels).numpy()) for at, pixels in sample.images] if tower else [])
            for sample in samples
        ]
        found[task] = [[request[layer] for request in requests if len(request[layer])] for layer in range(len(layers))]
    sizes = [role.num_experts for role in layers]
    return Recorded(
        model=folder.resolve().name,
        num_picks=layers[0].num_picks,
        tasks=list(found),
        num_requests=[len(of_task[0]) for of_task in found.values()],
        num_rows=[sum(map(len, of_task[0])) for of_task in found.values()],
        shares=[
            [np.round(shares(of_task[layer], num_experts), DIGITS).tolist() for of_task in found.values()]
            for layer, num_experts in enumerate(sizes)
        ],
        alike=[
            [round(alike(of_task[layer], num_experts), DIGITS) for of_task in found.values()]
            for layer, num_experts in enumerate(sizes)
        ],
    )


def picks(model: Model, sample: Sample, images: list[tuple[int, npt.NDArray[np.float32]]]) -> list[Picks]:
    """Of each layer, what the rows of the answer picked that decode computes: all tokens of it but the last."""
    pool = StatePool(model.config, 1, len(sample.tokens), device=model.device)
    slot = pool.alloc(len(sample.tokens))
    trace: dict[str, torch.Tensor] = {}
    model.forward(Batch.last_rows([(slot, 0, sample.tokens.tolist())], {slot: images} if images else None), pool, trace)
    rows = slice(prompt_end(sample.targets), len(sample.tokens) - 1)
    return [trace[f"{role.name}.gate_indices"][rows].cpu().numpy() for role in model.config.layers]
