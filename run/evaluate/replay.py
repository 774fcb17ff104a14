"""What bounded replay changes: whether it gives the exact answer, and how far from it each token's distribution is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.model import Model
from run.evaluate.decoding import Prompt, prefill
from run.evaluate.report import new_table, share, share_cells


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one prompt: whether replay gives the exact answer, and the divergence KL(exact, replay) of each of its tokens,
    the end among them, in nats."""

    row: str
    is_same: bool
    divergences: list[float]


def compare(
    model: Model, prompts: Sequence[Prompt], max_tokens: int, told: Callable[[], None] = lambda: None
) -> list[Comparison]:
    """Answer each prompt greedily without replay, to its end or to `max_tokens` tokens, then compute the same tokens
    behind the replayed prompt. `told` is called as each is done."""
    longest = max((len(prompt.tokens) for prompt in prompts), default=1) + max_tokens
    pool = StatePool(model.config, 1, longest, device=model.device)
    found = []
    for prompt in prompts:
        answer, exact = _answer(model, pool, prompt, max_tokens)
        slot, first = prefill(model, pool, prompt, max_tokens, exact=False)
        replayed = first[None]
        if len(answer) > 1:
            rows = model.forward(Batch.all_rows([(slot, len(prompt.tokens), answer[:-1])]), pool)
            replayed = torch.cat((replayed, model.logits(rows)))
        pool.free(slot)
        # Greedy answers are the same when each token is the likeliest behind the same ones before it.
        is_same = replayed.argmax(1).tolist() == answer
        found.append(Comparison(prompt.row, is_same, divergences(exact, replayed)))
        told()
    return found


def divergences(exact: torch.Tensor, replayed: torch.Tensor) -> list[float]:
    """KL(exact, replayed) of each row of two sets of logits [n, vocab], in nats."""
    p, q = (logits.double().log_softmax(1) for logits in (exact, replayed))
    return [float(one) for one in (p.exp() * (p - q)).sum(1).clamp(min=0)]


def _answer(model: Model, pool: StatePool, prompt: Prompt, max_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The exact prompt's answer, and the logits [n, vocab] that each of its tokens was taken from."""
    slot, logits = prefill(model, pool, prompt, max_tokens, exact=True)
    answer, rows = [int(logits.argmax())], [logits]
    while answer[-1] != model.config.eos_token_id and len(answer) < max_tokens:
        rows.append(model.logits(model.forward(Batch.last_rows([(slot, pool.length(slot), answer[-1:])]), pool))[0])
        answer.append(int(rows[-1].argmax()))
    pool.free(slot)
    return answer, torch.stack(rows)


def summaries(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """For each length of prompts: the share of same answers, and the divergence per token: mean, and the 99th
    percentile."""
    said = []
    for name in dict.fromkeys(one.row for one in found):
        group = [one for one in found if one.row == name]
        each = np.array([divergence for one in group for divergence in one.divergences])
        said.append(
            {
                "skill": name,
                **share(sum(one.is_same for one in group), len(group)),
                "num_tokens": len(each),
                "kl": float(f"{each.mean():.3g}"),
                "kl_p99": float(f"{np.percentile(each, 99):.3g}"),
            }
        )
    return said


def replay_table(said: Sequence[dict[str, Any]], title: str) -> Table:
    """A table of what `summaries` gives."""
    table = new_table(title, "set", "prompts", "same %", "95 %", "tokens", "KL per token", "its p99")
    for row in said:
        cells = (f"{row['num_tokens']:,}", f"{row['kl']:.3g}", f"{row['kl_p99']:.3g}")
        table.add_row(row["skill"], f"{row['num']:,}", *share_cells(row), *cells)
    return table
