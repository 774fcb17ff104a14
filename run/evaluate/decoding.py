"""One request after the other in this process, greedily, as an engine computes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.engine import Sampling
from kernels.model import Model, load_model


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as the engine gets it: the row it counts for, and its tokens.

    `images`: of each the position of its first token and its rows [num_tokens, hidden_size] fp32.
    """

    row: str
    tokens: list[int]
    images: list[tuple[int, npt.NDArray[np.float32]]]


GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0)
STEP_TOKENS = 512  # of a prefill step


def open_model(folder: Path) -> Model:
    """The model of a checkpoint folder, computed as engines do by default. Raises ConfigError and CheckpointError."""
    torch.set_num_threads(1)  # small products are slower on two threads than on one
    return load_model(folder)


def prefill(model: Model, pool: StatePool, prompt: Prompt, num_answer: int, *, exact: bool) -> tuple[int, torch.Tensor]:
    """Compute a prompt in a slot of its own, which has room for `num_answer` more tokens; free it in the end.

    Returns the slot and the logits [vocab] behind the prompt. Without `exact` the decoder computes the last window of
    it only, as it is served.
    """
    num = len(prompt.tokens)
    slot = pool.alloc(num + num_answer)
    if not exact:
        pool.plan_replay(slot, num)
    images = {slot: prompt.images} if prompt.images else None
    hidden = torch.empty(0)
    for start in range(0, num, STEP_TOKENS):
        run = (slot, start, prompt.tokens[start : start + STEP_TOKENS])
        hidden = model.forward(Batch.last_rows([run], images), pool)
    return slot, model.logits(hidden)[0]
