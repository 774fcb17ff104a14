"""A checkpoint on a GPU against the CPU: the same tokens fed to both, and a batch against each of its rows alone."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.model import Model, load_model

NUM_STEPS = 32
_PROMPTS = (300, 40, 9)
_LEAST_COSINE = 0.999
_LEAST_SAME = 0.9  # a logit that rounds the other way may tip a close choice


@dataclass(frozen=True)
class Agreement:
    """Of `NUM_STEPS` greedy tokens how many are the CPU's, the least cosine of their logits, whether rows alone have
    the bits of the batch, milliseconds of the prompt and of a decode step."""

    num_same: int
    cosine: float
    same_alone: bool
    prompt_ms: float
    step_ms: float

    @property
    def passed(self) -> bool:
        return self.same_alone and self.cosine >= _LEAST_COSINE and self.num_same >= _LEAST_SAME * NUM_STEPS

    def __str__(self) -> str:
        return (
            f"{self.num_same} of {NUM_STEPS} greedy tokens as on the CPU, cosine {self.cosine:.5f},"
            f" alone {'same' if self.same_alone else 'NO'}, prompt of {_PROMPTS[0]} {self.prompt_ms:.1f} ms,"
            f" step {self.step_ms:.1f} ms{'' if self.passed else '  FAILED'}"
        )


def check_model(folder: Path, device: str) -> Agreement:
    """Load `folder` on the CPU and on `device` and compare."""
    here, there = load_model(folder), load_model(folder, device=device)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, here.config.vocab_size // 2) for _ in range(length)] for length in _PROMPTS]
    _generate(there, prompts[0], 2)  # compiles
    want, _ = _generate(here, prompts[0], NUM_STEPS)
    got, times_ms = _generate(there, prompts[0], NUM_STEPS, want.argmax(1).tolist())
    return Agreement(
        num_same=int((got.argmax(1) == want.argmax(1)).sum()),
        cosine=float(torch.cosine_similarity(got, want).min()),
        same_alone=_same_alone(there, prompts),
        prompt_ms=times_ms[0],
        step_ms=statistics.median(times_ms[1:]),
    )


def _generate(
    model: Model, prompt: list[int], num_tokens: int, fed: list[int] | None = None
) -> tuple[torch.Tensor, list[float]]:
    """Logits behind the prompt and behind each of `fed`, or of what is sampled: [num_tokens, vocab] on the CPU."""
    pool = StatePool(model.config, 1, len(prompt) + num_tokens, device=model.device)
    slot, tokens, rows, times_ms = pool.alloc(), prompt, list[torch.Tensor](), list[float]()
    for number in range(num_tokens):
        start_s = time.perf_counter()
        batch = Batch.last_rows([(slot, pool.length(slot), tokens)])
        rows.append(model.logits(model.forward(batch, pool))[0].cpu())
        times_ms.append((time.perf_counter() - start_s) * 1e3)
        tokens = [int(rows[-1].argmax()) if fed is None else fed[number]]
    return torch.stack(rows), times_ms


def _same_alone(model: Model, prompts: list[list[int]]) -> bool:
    """Whether prompts, and a token behind each, give the same bits in one batch and one by one."""
    pool = StatePool(model.config, 2 * len(prompts), max(map(len, prompts)) + 1, device=model.device)
    slots, alone = [pool.alloc() for _ in prompts], [pool.alloc() for _ in prompts]
    for part in (prompts, [[5] for _ in prompts]):
        runs = [(slot, pool.length(slot), tokens) for slot, tokens in zip(slots, part, strict=True)]
        together = model.logits(model.forward(Batch.last_rows(runs), pool)).cpu()
        for slot, tokens, want in zip(alone, part, together, strict=True):
            got = model.logits(model.forward(Batch.last_rows([(slot, pool.length(slot), tokens)]), pool)).cpu()
            if not torch.equal(got[0], want):
                return False
    return True
