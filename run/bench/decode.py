"""`shoal bench decode`: decoding without drafts, with all of them verified, and with those that pay.

One process, an engine for each mode; nothing of the service around them. Their steps take turns, so that other work on
the machine hits all alike. Requests come as others end, the same ones in the same order in each mode. Those of
random text vary in length: requests that begin and end together take some 2 % less time a step, and stay together
without drafts only.
"""

from __future__ import annotations

import asyncio
import json as json_module
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kernels.config import ConfigError
from kernels.engine import Admission, Chunk, Sampling, Tokens
from kernels.local import LocalEngine
from kernels.schedule import Mode
from kernels.shards import CheckpointError
from run.evaluate.prompts import render
from run.evaluate.questions import sampled
from run.settings import Settings, SettingsError

Text = Literal["trained", "mixed", "random"]

MODES: tuple[Mode, ...] = ("off", "fixed", "scheduled")
BATCHES = (1, 4, 16, 64)
TASKS = ("transform", "arithmetic", "tools", "extraction", "about")
NUM_QUESTIONS = 16  # of each task
NUM_ANSWER = 64  # tokens of an answer: at most, and of random text on average
NUM_PROMPT = 32  # of random text, on average
WARM_S = 2.0  # of steps of a mode, at each batch, that are not counted: what a step takes is learned from some
SECONDS = 10.0  # of counted steps of a mode, at each batch
STEP_TOKENS = 512  # of a prefill step


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: Tokens
    sampling: Sampling
    num_answer: int


def bench_decode(
    model: Path | None = None, /, *, json: bool = False, text: Text = "mixed", seconds: float = SECONDS
) -> None:
    """Measure decode steps of 1, 4, 16 and 64 requests in the three modes of drafts.

    Parameters
    ----------
    model
        A checkpoint folder; SHOAL_MODEL, else the bundled one, by default.
    json
        Print one JSON object instead of a table: figures by mode, then batch.
    text
        "trained": questions of the bundled model's tasks, greedily, which drafts foresee well; "random": random tokens
        at temperature 1, which they do not; "mixed": the one and the other in turn.
    seconds
        Of steps, for each mode and batch; what comes before, and two more of steps that do not count, take their own.
    """
    if not 0 < seconds <= 3600:
        raise SettingsError(f"--seconds {seconds}: give a number above 0, and at most 3600")
    folder = model or Settings.from_environment().model
    with Progress(disable=json, transient=True) as progress:
        task = progress.add_task("decode", total=1.0)
        try:
            found = asyncio.run(measure(folder, text, seconds, lambda done: progress.update(task, completed=done)))
        except (ConfigError, CheckpointError) as error:
            raise SettingsError(str(error)) from None
    if json:
        print(json_module.dumps(found))
    else:
        _print(found, text)


async def measure(
    folder: Path, text: Text, seconds: float, told: Callable[[float], None] = lambda done: None
) -> dict[str, dict[str, dict[str, float]]]:
    """Everything that `--json` prints; `told` of the part that is done."""
    engines = {
        mode: LocalEngine(folder, num_slots=max(BATCHES), max_step_tokens=STEP_TOKENS, drafts=mode) for mode in MODES
    }
    for engine in engines.values():
        await engine.start()
    prompts = prompts_of(folder, text, engines["off"].info.vocab_size)
    found: dict[str, dict[str, dict[str, float]]] = {mode: {} for mode in MODES}
    turn, rng = list(MODES), random.Random(0)
    for number, batch in enumerate(BATCHES):
        loads = {mode: Load(engines[mode], prompts, batch, warm_s=WARM_S) for mode in MODES}
        while (least := min(load.spent_s for load in loads.values())) < seconds:
            told((number + least / seconds) / len(BATCHES))
            rng.shuffle(turn)  # who comes behind a long step finds the caches full of it
            for mode in turn:
                if loads[mode].spent_s < seconds:
                    await loads[mode].step()
        for mode, load in loads.items():
            found[mode][str(batch)] = load.figures()
            load.close()
    for engine in engines.values():
        await engine.close()
    return found


@dataclass
class Load:
    """So many requests at a time for one engine, and what its steps came to. `numbers`: which prompts, one after
    another, from the first again after the last; `warm_s`: steps of so long are not counted."""

    engine: LocalEngine
    prompts: list[_Prompt]
    batch: int
    numbers: Iterator[int] = field(default_factory=count)
    warm_s: float = 0.0
    spent_s: float = 0.0
    _steps_s: list[float] = field(default_factory=list)
    _cpu_s: float = 0.0
    _sums: Counter[str] = field(default_factory=Counter)
    _left: dict[str, int] = field(default_factory=dict)

    async def step(self) -> bool:
        """Bring in as many requests as are missing; then one step of all. False if there are none any more."""
        await self._fill()
        if not self._left:
            return False
        keys, before = list(self._left), self.engine.counts
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        new = await self.engine.decode(keys)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        for key, tokens in zip(keys, new, strict=True):
            self._left[key] -= len(tokens)
            if self._left[key] <= 0 or self.engine.info.eos_token in tokens:
                self.engine.free(key)
                del self._left[key]
        if self.warm_s > 0:
            self.warm_s -= took_s
            return True
        self.spent_s += took_s
        self._cpu_s += cpu_s
        self._steps_s.append(took_s)
        for name, now, then in zip(before._fields, self.engine.counts, before, strict=True):
            self._sums[name] += now - then
        self._sums["tokens"] += sum(map(len, new))
        self._sums["requests"] += len(keys)
        return True

    async def _fill(self) -> None:
        chunks = []
        for number in islice(self.numbers, self.batch - len(self._left)):
            prompt, key = self.prompts[number % len(self.prompts)], f"r{number}"
            room = len(prompt.tokens) + prompt.num_answer
            admission = self.engine.admit(key, room, prompt.sampling, bounded_prompt=len(prompt.tokens))
            assert admission is Admission.OK, admission
            self._left[key] = prompt.num_answer
            chunks.append(Chunk(key, prompt.tokens))
        if chunks:
            await self.engine.prefill(chunks)
            for chunk in chunks:  # the first token comes from the prompt's last row, and is no step's work
                self._left[chunk.key] -= len((await self.engine.decode([chunk.key]))[0])

    def figures(self) -> dict[str, float]:
        sums, num_steps = self._sums, len(self._steps_s)
        values = {
            "tok_s": sums["tokens"] / self.spent_s,
            "tok_cpu_s": sums["tokens"] / self._cpu_s,
            "tokens_per_step": sums["tokens"] / num_steps,
            "verified_per_token": sums["verified"] / sums["tokens"],
            "accepted_length": sums["tokens"] / sums["requests"],
            "drafted_per_token": sums["drafted"] / sums["tokens"],
            "step_ms": 1e3 * statistics.median(self._steps_s),
            "steps": num_steps,
        }
        return {name: round(float(value), 3) for name, value in values.items()}

    def close(self) -> None:
        for key in self._left:
            self.engine.free(key)


def prompts_of(folder: Path, text: Text, vocab_size: int) -> list[_Prompt]:
    rng = random.Random(0)
    num = NUM_QUESTIONS * len(TASKS)
    greedy = Sampling(0.0, 1.0, 0)
    asked = [] if text == "random" else render(folder, sampled(TASKS, NUM_QUESTIONS, "held-out"))
    rng.shuffle(asked)
    trained = [_Prompt(np.array(one.tokens, dtype=np.uint32), greedy, NUM_ANSWER) for one in asked]
    others = [_random_prompt(rng, vocab_size, seed) for seed in range(num)]
    if text == "mixed":
        return [prompt for pair in zip(trained, others, strict=True) for prompt in pair]
    return trained or others


def _random_prompt(rng: random.Random, vocab_size: int, seed: int) -> _Prompt:
    num, num_answer = (rng.randrange(mean // 2, mean * 3 // 2 + 1) for mean in (NUM_PROMPT, NUM_ANSWER))
    tokens = [rng.randrange(vocab_size // 4, vocab_size // 2) for _ in range(num)]
    return _Prompt(np.array(tokens, dtype=np.uint32), Sampling(1.0, 1.0, seed, first_end=1 << 30), num_answer)


def _print(found: dict[str, dict[str, dict[str, float]]], text: str) -> None:
    names = ("batch", "drafts", "tok/s", "tok/CPU s", "tokens a step", "accepted", "verified a token", "step ms")
    table = Table(*names, title=f"decode, {text} text")
    for batch in map(str, BATCHES):
        for mode in MODES:
            one = found[mode][batch]
            table.add_row(
                batch if mode == MODES[0] else "",
                mode,
                f"{one['tok_s']:,.0f}",
                f"{one['tok_cpu_s']:,.0f}",
                f"{one['tokens_per_step']:.1f}",
                f"{one['accepted_length']:.2f}",
                f"{one['verified_per_token']:.2f}",
                f"{one['step_ms']:.1f}",
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
