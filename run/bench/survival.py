"""`shoal bench survival`: how many drafts may be left unverified, for how little less accepted length.

All drafts are made and verified, each noted with the survival that the scheduler would have read from it before. Then
it can be told what any threshold would have left out: drafts behind one that is left out are less likely still, and
whatever follows a wrong one was in vain. And the scheduler itself runs, told that steps take what they would where rows
are cheap: by so little longer for all drafts together.
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
import numpy.typing as npt
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

BATCH = 16
NUM_STEPS = 150
NUM_PASSES = 3
"""Of a size, that a scheduler has to know."""

THRESHOLDS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
PRICES = (0.01, 0.03, 0.05)
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

    def learn(self, history: History, confidence: Floats, num_right: int) -> None:
        if len(confidence):
            self.blocks.append((self._waiting[id(history)][: len(confidence)], num_right))
        super().learn(history, confidence, num_right)


class Priced(Scheduler):
    """Schedules for a machine whose steps take 1 s, and `price` seconds more with all drafts; `blocks`: how many drafts
    of each were verified, and how many were right."""

    nearly = 1.0  # rows of different numbers are as quick as others there

    def __init__(self, mode: Mode, temperatures: Floats, price: float) -> None:
        super().__init__(mode, temperatures)
        self.blocks: list[tuple[int, int]] = []
        for num_drafts in range(len(temperatures) + 1):
            for _ in range(NUM_PASSES):
                num_rows = BATCH * (1 + num_drafts)
                super().took(BATCH, 0.0, num_rows, 1.0 + price * num_drafts / len(temperatures))

    def took(self, num_blocks: int, draft_s: float, num_rows: int, verify_s: float) -> None:
        """How long this machine takes does not matter."""

    def learn(self, history: History, confidence: Floats, num_right: int) -> None:
        self.blocks.append((len(confidence), num_right))
        super().learn(history, confidence, num_right)


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
        blocks = asyncio.run(_run(folder, text, "fixed", Noting)).blocks
        made = [asyncio.run(_run(folder, text, "scheduled", partial(Priced, price=price))) for price in PRICES]
    except (ConfigError, CheckpointError) as error:
        raise SettingsError(str(error)) from None
    found = {str(threshold): figures(blocks, threshold) for threshold in THRESHOLDS}
    found |= {f"price {price}": priced(blocks, one.blocks) for price, one in zip(PRICES, made, strict=True)}
    if json:
        print(json_module.dumps(found))
        return
    table = Table("survival", "verified", "accepted", "verified a token", title=f"{len(blocks)} blocks, {text} text")
    for name, one in found.items():
        parts = (f"{one['verified']:+.1%}", f"{one['accepted']:+.1%}", f"{one['verified_per_token']:.2f}")
        table.add_row(name if name.startswith("price") else f"{float(name):.1%}", *parts)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


async def _run(folder: Path, text: Text, mode: Mode, kind: Callable[[Mode, Floats], S]) -> S:
    """The scheduler of some steps of BATCH requests."""
    made: list[S] = []

    def make(mode: Mode, temperatures: Floats) -> Scheduler:
        made.append(kind(mode, temperatures))
        return made[-1]

    engine = LocalEngine(folder, num_slots=BATCH, max_step_tokens=STEP_TOKENS, drafts=mode, scheduler=make)
    await engine.start()
    load = Load(engine, prompts_of(folder, text, engine.info.vocab_size), BATCH)
    for _ in range(NUM_STEPS):
        await load.step()
    await engine.close()
    return made[0]


def figures(blocks: Sequence[tuple[Floats, int]], threshold: float) -> dict[str, float]:
    """With drafts verified that survive at least so likely: changes of verified tokens and of accepted length against
    all of them, and verified tokens for each that comes."""
    lengths = np.array([len(survival) for survival, _ in blocks])
    kept = np.array([int((survival >= threshold).sum()) for survival, _ in blocks])
    right = np.array([num_right for _, num_right in blocks])
    verified, accepted = _tokens(kept), _tokens(np.minimum(right, kept))
    return {
        "verified": verified / _tokens(lengths) - 1,
        "accepted": accepted / _tokens(right) - 1,
        "verified_per_token": verified / accepted,
    }


def priced(blocks: Sequence[tuple[Floats, int]], scheduled: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The same of a run that was scheduled, for each request and step."""
    lengths = np.array([len(survival) for survival, _ in blocks])
    right = np.array([num_right for _, num_right in blocks])
    kept, came = np.array(scheduled).T
    verified, accepted = _tokens(kept) / len(kept), _tokens(came) / len(came)
    return {
        "verified": verified / (_tokens(lengths) / len(lengths)) - 1,
        "accepted": accepted / (_tokens(right) / len(right)) - 1,
        "verified_per_token": verified / accepted,
    }


def _tokens(drafts: npt.NDArray[np.int64]) -> int:
    return int((1 + drafts).sum())
