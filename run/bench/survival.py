"""`shoal bench survival`: how many drafts may be left unverified, for how little less accepted length.

All drafts are made and verified, each noted with the survival that the scheduler would have read from it before. Then
it can be told what any threshold would have left out: drafts behind one that is left out are less likely still, and
whatever follows a wrong one was in vain. And the scheduler itself runs, told that steps take what they would where rows
are cheap: by so little longer for all drafts together. Each run answers the same requests whole, so all give the same
tokens: what differs is in how many steps, and verifying how many.
"""

from __future__ import annotations

import asyncio
import json as json_module
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from kernels.config import ConfigError
from kernels.local import LocalEngine
from kernels.schedule import History, Mode, Scheduler
from kernels.shards import CheckpointError
from kernels.steptimes import Floats
from run.bench.decode import STEP_TOKENS, Load, Text, prompts_of
from run.settings import Settings, SettingsError

S = TypeVar("S", bound=Scheduler)
Whole = dict[str, float]
"""As of `Load.figures`."""

BATCH = 16
NUM_REQUESTS = 160
NUM_PASSES = 3
"""Of a size, that a scheduler has to know."""

THRESHOLDS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
PRICES = (0.02, 0.05, 0.1)
"""What all drafts of a step add to its time, as parts of it: those of accelerators that weights keep busy."""


class Noting(Scheduler):
    """Drafts for all, verifies all; `blocks`: the survival of each block's verified drafts, and how many were right."""

    def __init__(self, mode: Mode, temperatures: Floats) -> None:
        super().__init__(mode, temperatures)
        self.blocks: list[tuple[Floats, int]] = []
        self._waiting: dict[int, Floats] = {}

    def admit(
        self, raw: Floats, lengths: Sequence[int], histories: Sequence[History], num_rows: int
    ) -> tuple[list[int], Floats]:
        every, confidence = super().admit(raw, lengths, histories, num_rows)
        self._waiting = {id(one): row for one, row in zip(histories, self.survival(confidence, histories), strict=True)}
        return every, confidence

    def learn(self, history: History, confidence: Sequence[float], num_right: int) -> None:
        if len(confidence):
            self.blocks.append((self._waiting[id(history)][: len(confidence)], num_right))
        super().learn(history, confidence, num_right)


class Priced(Scheduler):
    """Schedules for a machine whose steps take 1 s, and `price` seconds more with all drafts."""

    nearly = 1.0  # rows of different numbers are as quick as others there

    def __init__(self, mode: Mode, temperatures: Floats, price: float) -> None:
        super().__init__(mode, temperatures)
        num_drafts = BATCH * len(temperatures)
        for num_rows in range(1, BATCH + num_drafts + 1):
            took_s = 1.0 + price * max(num_rows - BATCH, 0) / num_drafts
            for _ in range(NUM_PASSES):
                super().took(min(num_rows, BATCH), 0.0, [num_rows], took_s)

    def took(self, num_blocks: int, draft_s: float, lengths: Sequence[int], verify_s: float) -> None:
        """How long this machine takes does not matter."""


def bench_survival(model: Path | None = None, /, *, json: bool = False, text: Text = "mixed") -> None:
    """Say what verifying only drafts above a survival saves and costs, against verifying all.

    Parameters
    ----------
    model
        A checkpoint folder; SHOAL_MODEL, else the bundled one, by default.
    json
        Print one JSON object instead of a table: figures by threshold, and by price.
    text
        As for `shoal bench decode`.
    """
    folder = model or Settings.from_environment().model
    try:
        noting, whole = asyncio.run(_run(folder, text, "fixed", Noting))
        made = [asyncio.run(_run(folder, text, "scheduled", partial(Priced, price=price)))[1] for price in PRICES]
    except (ConfigError, CheckpointError) as error:
        raise SettingsError(str(error)) from None
    found = {str(threshold): figures(noting.blocks, threshold) for threshold in THRESHOLDS}
    found |= {f"price {price}": against(whole, one) for price, one in zip(PRICES, made, strict=True)}
    if json:
        print(json_module.dumps(found))
        return
    title = f"{len(noting.blocks)} blocks, {text} text"
    table = Table("survival", "verified", "accepted", "verified a token", title=title)
    for name, one in found.items():
        parts = (f"{one['verified']:+.1%}", f"{one['accepted']:+.1%}", f"{one['verified_per_token']:.2f}")
        table.add_row(name if name.startswith("price") else f"{float(name):.1%}", *parts)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


async def _run(folder: Path, text: Text, mode: Mode, kind: Callable[[Mode, Floats], S]) -> tuple[S, Whole]:
    """The scheduler of NUM_REQUESTS requests, BATCH of them at a time, and what their steps came to."""
    made: list[S] = []

    def make(mode: Mode, temperatures: Floats) -> Scheduler:
        made.append(kind(mode, temperatures))
        return made[-1]

    engine = LocalEngine(folder, num_slots=BATCH, max_step_tokens=STEP_TOKENS, drafts=mode, scheduler=make)
    await engine.start()
    load = Load(engine, prompts_of(folder, text, engine.info.vocab_size), BATCH, iter(range(NUM_REQUESTS)))
    while await load.step():
        pass
    await engine.close()
    return made[0], load.figures()


def figures(blocks: Sequence[tuple[Floats, int]], threshold: float) -> dict[str, float]:
    """With drafts verified that survive at least so likely: changes of the tokens verified for the same output, and of
    accepted length, against all of them; and verified tokens for each that comes."""
    lengths, right = [len(survival) for survival, _ in blocks], [num_right for _, num_right in blocks]
    kept = [int((survival >= threshold).sum()) for survival, _ in blocks]
    return against(_whole(lengths, right), _whole(kept, np.minimum(right, kept).tolist()))


def against(whole: Whole, some: Whole) -> dict[str, float]:
    """What `some` came to, whose requests gave the same tokens, against `whole`."""
    return {
        "verified": some["verified_per_token"] / whole["verified_per_token"] - 1,
        "accepted": some["accepted_length"] / whole["accepted_length"] - 1,
        "verified_per_token": some["verified_per_token"],
    }


def _whole(verified: Sequence[int], right: Sequence[int]) -> Whole:
    """Of blocks: each has a row that is verified anyway, and gives a token."""
    num, num_tokens = len(verified), len(right) + sum(right)
    return {"verified_per_token": (num + sum(verified)) / num_tokens, "accepted_length": num_tokens / num}
