"""What drafts are worth: how many are right, place by place, and whether their confidence says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.model import Model
from kernels.verify import verify
from run.evaluate.calibration import Floats
from run.evaluate.decoding import GREEDY, Prompt, prefill


@dataclass(frozen=True, slots=True)
class Step:
    """One step of decoding: a block of drafts, and what the target made of it.

    confidence: raw, of each draft; num_right: how many drafts from the first on the target agrees with; num_counted:
    how many could be agreed with, which is all but those behind the end of the answer; num_new: tokens of the answer.
    """

    row: str
    confidence: list[float]
    num_right: int
    num_counted: int
    num_new: int


def run_drafts(
    model: Model, prompts: Sequence[Prompt], max_tokens: int, told: Callable[[], None] = lambda: None
) -> list[Step]:
    """Answer each prompt greedily, with whole blocks of drafts, to its end or to `max_tokens` tokens.

    `told` is called as each is done. Raises ValueError when the model has no draft stages.
    """
    if model.drafter is None:
        raise ValueError("the model has no draft stages")
    size = model.config.dspark_block_size
    longest = max((len(prompt.tokens) for prompt in prompts), default=1) + max_tokens + size + 1
    pool = StatePool(model.config, 1, longest, size, drafts=True, device=model.device)
    steps: list[Step] = []
    for prompt in prompts:
        steps += _answer(model, pool, prompt, max_tokens)
        told()
    return steps


def _answer(model: Model, pool: StatePool, prompt: Prompt, max_tokens: int) -> list[Step]:
    assert model.drafter is not None
    eos, size = model.config.eos_token_id, model.config.dspark_block_size
    slot, logits = prefill(model, pool, prompt, max_tokens + size + 1, exact=False)
    token, num_tokens, steps = int(logits.argmax()), 1, list[Step]()
    while token != eos and num_tokens < max_tokens:
        drafts = model.drafter.draft([(slot, token)], [GREEDY], pool)
        proposed, start = drafts.tokens[0].tolist(), pool.length(slot)
        rows = model.forward(Batch.all_rows([(slot, start, [token, *proposed])]), pool)
        (new,) = verify(model.logits(rows), [proposed], [start], [GREEDY])
        pool.truncate(slot, start + len(new))
        steps.append(judged(prompt.row, drafts.confidence[0].tolist(), new, eos))
        token, num_tokens = new[-1] if eos not in new else eos, num_tokens + len(new)
    pool.free(slot)
    return steps


def judged(row: str, confidence: list[float], new: list[int], eos: int) -> Step:
    """The step whose block of drafts gave the tokens `new`: right ones, and one that the target adds."""
    num_right, size = len(new) - 1, len(confidence)
    if eos in new[:num_right]:  # drafted and agreed with: nothing is known of what would follow
        num_right = num_counted = new.index(eos) + 1
        return Step(row, confidence, num_right, num_counted, num_right)
    return Step(row, confidence, num_right, size, len(new))


def arrays(steps: Sequence[Step]) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Raw confidence [steps, places], `num_right` and `num_counted` [steps]: what `calibration` works on."""
    return (
        np.array([step.confidence for step in steps], dtype=np.float64),
        np.array([step.num_right for step in steps], dtype=np.int64),
        np.array([step.num_counted for step in steps], dtype=np.int64),
    )
