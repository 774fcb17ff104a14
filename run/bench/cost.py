"""`shoal bench cost`: how well what prefill costs is foretold on the engine that computes here.

First the sweep of a prefill replica's start. Then whole prompts of many sizes, behind prefixes of many sizes, in steps
as long as a replica may make them. One half of them refits the cost as it does online, the other half is judged.
Of each step the least of some rounds counts, as other work on the machine only adds.
"""

from __future__ import annotations

import asyncio
import json as json_module
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from actors.prefill.computing import measure as measure_sweep
from actors.rules.cost import WINDOW, Cost, Terms, Work, chunk_terms, fit
from actors.rules.meter import Meter
from kernels.engine import BLOCK_TOKENS, Admission, Chunk, Prefix, Sampling
from kernels.local import LocalEngine
from run.build import MAX_STEP_TOKENS
from run.settings import Settings

NUMS_NEW = (1, 64, 128, 200, 300, 512, 700, 1024, 1500, 2048, 3000, 4096)
NUMS_CACHED = (0, 128, 512, 1024, 2048, 3072, 4096)
NUMS_EXACT = (128, 512, 1024, 2048, 4096)
NUM_ROUNDS = 3

_GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0)
_KEY = "prompt"


def bench_cost(model: Path | None = None, /, *, json: bool = False, threads: int = 1) -> None:
    """Measure prompts of 1 to 4,096 tokens behind 0 to 4,096 cached ones, and what was foretold of them.

    Parameters
    ----------
    model
        A checkpoint folder; SHOAL_MODEL, else the bundled one, by default.
    json
        Print one JSON object instead of tables.
    threads
        Of the engine. Small models are fastest with one.
    """
    folder = model or Settings.from_environment().model
    with Progress(disable=json, transient=True) as progress:
        task = progress.add_task("prefill", total=1.0)
        found = asyncio.run(measure(folder, threads, lambda done: progress.update(task, completed=done)))
    if json:
        print(json_module.dumps(found))
    else:
        _print(found)


class Took(NamedTuple):
    """Nanoseconds to load a prompt's prefix, and of each of its steps."""

    load_ns: float
    steps_ns: list[float]

    def least(self, other: Took) -> Took:
        """Of two rounds."""
        steps_ns = [min(pair) for pair in zip(self.steps_ns, other.steps_ns, strict=True)]
        return Took(min(self.load_ns, other.load_ns), steps_ns)


Timed = dict[Work, Took]


async def measure(folder: Path, num_threads: int, told: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
    """Everything that `--json` prints."""
    engine = LocalEngine(folder, num_slots=2, max_step_tokens=MAX_STEP_TOKENS, num_threads=num_threads)
    await engine.start()
    meter = Meter()
    started_s = time.perf_counter()
    await measure_sweep(engine, meter)
    found: dict[str, Any] = {"sweep_s": round(time.perf_counter() - started_s, 3)}
    # Those of the grid, where a replica on a busy machine makes shorter ones.
    meter.cost = replace(meter.cost, step_tokens=MAX_STEP_TOKENS)
    timed = await _Prompts(engine).measure(told)
    await engine.close()

    found.update(_judged(meter, timed))
    return found


def _judged(meter: Meter, timed: Timed) -> dict[str, Any]:
    """Half of the prompts go into the meter, which knows the sweep; how the other half was foretold."""
    works = [work for work in timed if not work.is_exact]
    random.Random(1).shuffle(works)
    learnt, judged, exact = works[::2], works[1::2], [work for work in timed if work.is_exact]
    swept = meter.cost
    samples = [sample for work in learnt for sample in zip(_steps(work), timed[work].steps_ns, strict=True)]
    for terms, step_ns in samples:
        meter.add(terms, step_ns)
    for work in learnt:
        if timed[work].load_ns:
            meter.add(Terms(steps=0, blocks=work.num_blocks), timed[work].load_ns)
    bare = fit([(terms._replace(tail_tokens=0, tail_pairs=0, context=0), step_ns) for terms, step_ns in samples])
    costs = {"sweep": swept, "online": meter.cost, "quadratic": replace(bare, step_tokens=swept.step_tokens)}

    def error(cost: Cost, work: Work) -> float:
        return abs(cost.work_ns(work._replace(num_blocks=0)) / sum(timed[work].steps_ns) - 1)

    errors = {name: [error(cost, work) for work in judged] for name, cost in costs.items()}
    return {
        "residual": {name: round(statistics.median(each), 4) for name, each in errors.items()},
        "residual_p90": {name: round(float(np.percentile(each, 90)), 4) for name, each in errors.items()},
        "residual_exact": round(statistics.median(error(meter.cost, work) for work in exact), 4),
        "residual_steps": round(meter.residual, 4),
        "cost": {name: float(f"{value:.6g}") for name, value in asdict(meter.cost).items()},
        "prompts": [
            {
                **work._asdict(),
                "took_ms": round(sum(timed[work].steps_ns) / 1e6, 2),
                "foretold_ms": round(meter.cost.work_ns(work._replace(num_blocks=0)) / 1e6, 2),
                "is_judged": work not in learnt,
            }
            for work in sorted(timed)
        ],
    }


def _cuts(work: Work) -> Iterator[tuple[int, int, int]]:
    """Of each step: its tokens, those before and those behind it."""
    done, end = work.num_cached - work.num_replayed, work.num_cached + work.num_new
    while done < end:
        num_tokens = min(MAX_STEP_TOKENS, end - done)
        yield num_tokens, done, end - done - num_tokens
        done += num_tokens


def _steps(work: Work) -> list[Terms]:
    return [chunk_terms(*cut, is_exact=work.is_exact) for cut in _cuts(work)]


class _Prompts:
    """The prompts of the grid, computed and timed. All begin with the same tokens, of which prefixes are at hand."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        info = engine.info
        self._tokens = np.random.default_rng(0).integers(3, info.vocab_size // 2, info.max_tokens, dtype=np.uint32)
        self._prefixes: dict[int, Prefix] = {}

    async def measure(self, told: Callable[[float], None]) -> Timed:
        """The least of all rounds."""
        most = self._engine.info.max_tokens
        nums_cached = [num for num in NUMS_CACHED if num < most]
        for num_cached in filter(None, nums_cached):
            self._prefixes[num_cached] = await self._prefix(num_cached)
        works = [
            # Of every other prefix the windows are lost, so that its last one is replayed.
            Work(num_new, num_cached, WINDOW if number % 2 and _is_restored(num_new) else 0, num_cached // BLOCK_TOKENS)
            for number, num_cached in enumerate(nums_cached)
            for num_new in NUMS_NEW
            if num_new + num_cached <= most
        ]
        works += [Work(num_new, is_exact=True) for num_new in NUMS_EXACT if num_new <= most]
        timed: Timed = {}
        total, done = NUM_ROUNDS * sum(_size(work) for work in works), 0
        for number in range(NUM_ROUNDS):
            random.Random(number).shuffle(works)
            for work in works:
                took = await self._took(work)
                timed[work] = took.least(timed.get(work, took))
                done += _size(work)
                told(done / total)
        return timed

    async def _prefix(self, num_tokens: int) -> Prefix:
        engine, work = self._engine, Work(num_tokens)
        self._admit(work)
        await self._compute(work)
        blocks = await engine.blocks(_KEY, 0, num_tokens // BLOCK_TOKENS)
        windows = await engine.windows(_KEY, num_tokens)
        engine.free(_KEY)
        return Prefix(self._tokens[:num_tokens], blocks, windows)

    async def _took(self, work: Work) -> Took:
        self._admit(work)
        load_ns = 0
        if work.num_cached and _is_restored(work.num_new):
            prefix = self._prefixes[work.num_cached]
            start_ns = time.perf_counter_ns()
            await self._engine.resume(_KEY, replace(prefix, windows=None) if work.num_replayed else prefix)
            load_ns = time.perf_counter_ns() - start_ns
        elif work.num_cached:
            await self._compute(Work(work.num_cached))
        steps_ns = await self._compute(work)
        self._engine.free(_KEY)
        return Took(load_ns, steps_ns)

    def _admit(self, work: Work) -> None:
        num_tokens = work.num_cached + work.num_new
        bounded = 0 if work.is_exact else num_tokens
        admission = self._engine.admit(_KEY, num_tokens, _GREEDY, bounded_prompt=bounded)
        assert admission is Admission.OK, admission

    async def _compute(self, work: Work) -> list[float]:
        chunks = [Chunk(_KEY, self._tokens[done : done + num_tokens]) for num_tokens, done, _ in _cuts(work)]
        return [float(await self._engine.prefill([chunk])) for chunk in chunks]


def _is_restored(num_new: int) -> bool:
    """A cached prefix leaves a window to compute; with less left, what is before was computed in earlier steps."""
    return num_new >= WINDOW


def _size(work: Work) -> int:
    """About how long it takes, for the progress bar."""
    return 200 + work.num_new + (work.num_replayed if _is_restored(work.num_new) else work.num_cached)


def _print(found: dict[str, Any]) -> None:
    console = Console()
    table = Table("", *found["residual"], title="error of what was foretold of prompts not seen before")
    for title, key in (("median", "residual"), ("90th percentile", "residual_p90")):
        table.add_row(title, *(f"{share:.1%}" for share in found[key].values()))
    console.print(table)
    bounded = [one for one in found["prompts"] if not one["is_exact"]]
    nums_cached = sorted({one["num_cached"] for one in bounded})
    title = "milliseconds of tokens behind cached ones, and error online"
    table = Table("tokens", *(f"+ {num:,}" for num in nums_cached), title=title)
    for num_new in sorted({one["num_new"] for one in bounded}):
        row = {one["num_cached"]: _cell(one) for one in bounded if one["num_new"] == num_new}
        table.add_row(f"{num_new:,}", *(row.get(num, "") for num in nums_cached))
    console.print(table)
    exact = ", ".join(f"{one['num_new']:,}: {_cell(one)}" for one in found["prompts"] if one["is_exact"])
    console.print(f"exact prompts, in milliseconds: {exact}; median error {found['residual_exact']:.1%}")
    console.print(f"the sweep takes {found['sweep_s']:.2f} s; nanoseconds, online:")
    console.print(", ".join(f"{name} {value:,.6g}" for name, value in found["cost"].items()))


def _cell(one: dict[str, Any]) -> str:
    return f"{one['took_ms']:.0f} {one['foretold_ms'] / one['took_ms'] - 1:+.0%}"
