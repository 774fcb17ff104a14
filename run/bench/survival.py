"""`shoal bench survival`: how many drafts may be left unverified, for how little less accepted length.

All drafts are made and verified, each noted with the survival that the scheduler would have read from it before. Then
it can be told what any threshold would have left out: drafts behind one that is left out are less likely still, and
whatever follows a wrong one was in vain.
"""

from __future__ import annotations

import asyncio
import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path

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

BATCH = 16
NUM_STEPS = 150
THRESHOLDS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


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


def bench_survival(model: Path | None = None, /, *, json: bool = False, text: Text = "mixed") -> None:
    """Say what verifying only drafts above a survival saves and costs, against verifying all.

    Parameters
    ----------
    model
        A checkpoint folder; SHOAL_MODEL, else the bundled one, by default.
    json
        Print one JSON object instead of a table: figures by threshold.
    text
        As for `shoal bench decode`.
    """
    folder = model or Settings.from_environment().model
    try:
        blocks = asyncio.run(noted(folder, text))
    except (ConfigError, CheckpointError) as error:
        raise SettingsError(str(error)) from None
    found = {str(threshold): figures(blocks, threshold) for threshold in THRESHOLDS}
    if json:
        print(json_module.dumps(found))
        return
    table = Table("survival", "verified", "accepted", "verified a token", title=f"{len(blocks)} blocks, {text} text")
    for name, one in found.items():
        parts = (f"{one['verified']:+.1%}", f"{one['accepted']:+.1%}", f"{one['verified_per_token']:.2f}")
        table.add_row(f"{float(name):.1%}", *parts)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


async def noted(folder: Path, text: Text) -> list[tuple[Floats, int]]:
    """The blocks of some steps of BATCH requests."""
    made: list[Noting] = []

    def make(mode: Mode, temperatures: Floats) -> Scheduler:
        made.append(Noting(mode, temperatures))
        return made[-1]

    engine = LocalEngine(folder, num_slots=BATCH, max_step_tokens=STEP_TOKENS, drafts="fixed", scheduler=make)
    await engine.start()
    load = Load(engine, prompts_of(folder, text, engine.info.vocab_size), BATCH)
    for _ in range(NUM_STEPS):
        await load.step()
    await engine.close()
    return made[0].blocks


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


def _tokens(drafts: npt.NDArray[np.int64]) -> int:
    return int((1 + drafts).sum())
