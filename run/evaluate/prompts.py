"""Questions as the engine gets them: prompt tokens, and rows for their images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.config import ModelConfig
from kernels.vision import load_vision
from run.evaluate.decoding import Prompt
from run.evaluate.questions import Question
from run.train.rendering import Renderer


def render(folder: Path, questions: Sequence[Question]) -> list[Prompt]:
    """The prompts of `questions` as the service would make them, for the model in `folder`."""
    renderer = Renderer(folder)
    tower = load_vision(folder) if ModelConfig.from_folder(folder).vision is not None else None
    found = []
    for question in questions:
        sample = renderer.render(question.example)
        images = [(at, tower.encode(pixels).numpy()) for at, pixels in sample.images] if tower else []
        found.append(Prompt(question.row, sample.tokens[: prompt_end(sample.targets)].tolist(), images))
    return found


def prompt_end(targets: npt.NDArray[np.bool_]) -> int:
    """Where the last stretch of targets begins, the answer: everything before it is the prompt."""
    (others,) = np.nonzero(~targets)
    return int(others[-1]) + 1
