"""`shoal bench engine`: what the computing engine does in a second, where its time goes, what the machine could do.

One process, one engine thread; nothing of the service around it. Medians of rounds; what is compared is interleaved, so
that other work on the machine hits all of it alike.
"""

from __future__ import annotations

import asyncio
import json as json_module
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kernels.config import ModelConfig
from kernels.engine import Admission, Chunk, Sampling
from kernels.flops import decode_weights, prefill_flops
from kernels.local import LocalEngine
from kernels.schedule import Mode
from run.bench.operations import timed_operations
from run.settings import Settings

PREFILLS = (128, 1024, 4096)
REPLAYS = (512, 1024, 2048, 4096, 8192)
BATCHES = (1, 8, 32)
NUM_ROUNDS = 3
NUM_STEPS = 12  # of a decode round
CONTEXT = 100  # prompt tokens of a request that decodes
STEP_TOKENS = 512  # of a prefill step
RAW_SIZE = 1024  # rows and columns of the product that shows the machine's limit
RAW_BYTES = 1 << 28  # of the copy that does

_GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0)
_SAMPLED = Sampling(temperature=1.0, top_p=1.0, seed=0)


def bench_engine(model: Path | None = None, /, *, json: bool = False, threads: int = 1) -> None:
    """Measure and print prefill and decode speed, time per operation, and the machine's raw limits.

    Parameters
    ----------
    model
        A checkpoint folder; SHOAL_MODEL, else the bundled one, by default.
    json
        Print one JSON object instead of tables.
    threads
        Of the engine. Small models are fastest with one.
    """
    found = asyncio.run(measure(model or Settings.from_environment().model, threads))
    if json:
        print(json_module.dumps(found))
    else:
        _print(found)


async def measure(folder: Path, num_threads: int) -> dict[str, Any]:
    """Everything that `--json` prints."""
    config = ModelConfig.from_folder(folder)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(num_threads,)) as thread:
        _say("raw limits")
        raw = await asyncio.get_running_loop().run_in_executor(thread, _raw)
    engine = await _started(folder, num_threads, drafts="off")
    lengths = [n for n in sorted({*PREFILLS, *REPLAYS}) if n <= engine.info.max_tokens]
    bounded, exact = await _prefills(engine, lengths)
    steps_s = {n: await _decode(engine, n) for n in BATCHES}
    await engine.close()
    found: dict[str, Any] = {
        "prefill_tok_s": {str(n): round(n / bounded[n]) for n in lengths if n in PREFILLS},
        "prefill_exact_tok_s": {str(n): round(n / exact[n]) for n in lengths if n in PREFILLS},
        "decode_tok_s": {str(n): round(n / steps_s[n][0], 1) for n in BATCHES},
        "decode_drafts_tok_s": {},
        "decode_drafts_tok_step": {},
        "replay_time_ratio": {str(n): round(bounded[n] / exact[n], 3) for n in lengths if n in REPLAYS},
        "replay_flops_ratio": {
            str(n): round(prefill_flops(config, n, replay=True) / prefill_flops(config, n, replay=False), 3)
            for n in lengths
            if n in REPLAYS
        },
        "prefill_gflop_s": {
            str(n): round(prefill_flops(config, n, replay=True) / bounded[n] / 1e9, 2) for n in lengths
        },
        "decode_weight_gb_s": {
            str(n): round(4 * decode_weights(config, n) / steps_s[n][0] / 1e9, 3) for n in BATCHES
        },
        "raw": raw,
    }
    if config.num_nextn_predict_layers:
        engine = await _started(folder, num_threads, drafts="fixed")
        for n in BATCHES:
            step_s, num_tokens = await _decode(engine, n)
            found["decode_drafts_tok_s"][str(n)] = round(num_tokens / step_s, 1)
            found["decode_drafts_tok_step"][str(n)] = round(num_tokens / n, 2)
        await engine.close()
    found["ops"] = await _operations(folder, num_threads)
    return found


async def _started(folder: Path, num_threads: int, *, drafts: Mode) -> LocalEngine:
    engine = LocalEngine(
        folder, num_slots=max(BATCHES), max_step_tokens=STEP_TOKENS, num_threads=num_threads, drafts=drafts
    )
    await engine.start()
    return engine


async def _prefill(engine: LocalEngine, key: str, num_tokens: int, *, bounded: bool) -> float:
    """Seconds for one prompt of random tokens of text; the request stays admitted, with room to generate."""
    rng = random.Random(num_tokens)
    room = min(num_tokens + 1000, engine.info.max_tokens)
    admission = engine.admit(key, room, _GREEDY, bounded_prompt=num_tokens if bounded else 0)
    assert admission is Admission.OK, admission
    tokens = np.array([rng.randrange(3, engine.info.vocab_size // 2) for _ in range(num_tokens)], dtype=np.uint32)
    start_s = time.perf_counter()
    for first in range(0, num_tokens, STEP_TOKENS):
        await engine.prefill([Chunk(key, tokens[first : first + STEP_TOKENS])])
    return time.perf_counter() - start_s


async def _prefills(engine: LocalEngine, lengths: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Median seconds of prompts of these lengths, with bounded replay and exact."""
    taken: dict[bool, dict[int, list[float]]] = {mode: {n: [] for n in lengths} for mode in (True, False)}
    for i in range(NUM_ROUNDS + 1):
        _say(f"prefill, round {i} of {NUM_ROUNDS}")
        for n in lengths[:2] if i == 0 else lengths:
            for bounded in (True, False):
                took_s = await _prefill(engine, "p", n, bounded=bounded)
                engine.free("p")
                if i > 0:
                    taken[bounded][n].append(took_s)
    return _medians(taken[True]), _medians(taken[False])


async def _decode(engine: LocalEngine, num_requests: int) -> tuple[float, float]:
    """Median seconds of a decode step of that many requests, and the tokens that such a step gives all of them."""
    keys = [f"d{i}" for i in range(num_requests)]
    for key in keys:
        await _prefill(engine, key, CONTEXT, bounded=True)
    _say(f"decode of {num_requests}")
    rounds = []
    for _ in range(NUM_ROUNDS + 1):
        start_s, num_tokens = time.perf_counter(), 0
        for _ in range(NUM_STEPS):
            num_tokens += sum(len(new) for new in await engine.decode(keys))
        rounds.append(((time.perf_counter() - start_s) / NUM_STEPS, num_tokens / NUM_STEPS))
    for key in keys:
        engine.free(key)
    return sorted(rounds[1:], key=lambda one: one[0] / one[1])[NUM_ROUNDS // 2]


async def _operations(folder: Path, num_threads: int) -> dict[str, dict[str, float]]:
    """Milliseconds per operation of one prefill step and of decode steps; "other" is Python between the operations."""
    found = {}
    with timed_operations() as clock:
        engine = await _started(folder, num_threads, drafts="off")

        async def share(num_repeats: int, work: Callable[[], Any]) -> dict[str, float]:
            await work()
            clock.reset()
            start_ns = time.perf_counter_ns()
            for _ in range(num_repeats):
                await work()
            spent = {**clock.spent_ns, "other": time.perf_counter_ns() - start_ns - sum(clock.spent_ns.values())}
            ordered = sorted(spent.items(), key=lambda item: -item[1])
            return {name: round(took_ns / num_repeats / 1e6, 3) for name, took_ns in ordered}

        async def prefill() -> None:
            await _prefill(engine, "p", STEP_TOKENS, bounded=True)
            engine.free("p")

        _say("time per operation")
        found[f"prefill_{STEP_TOKENS}"] = await share(NUM_ROUNDS, prefill)
        for n in (1, max(BATCHES)):
            keys = [f"d{i}" for i in range(n)]
            for key in keys:
                await _prefill(engine, key, CONTEXT, bounded=True)
            found[f"decode_{n}"] = await share(NUM_STEPS, lambda keys=keys: engine.decode(keys))  # type: ignore[misc]
            for key in keys:
                engine.free(key)
        await engine.close()
    return found


def _raw() -> dict[str, float]:
    """The most that this machine does: a large fp32 product, and a large copy (bytes read plus bytes written)."""
    a, b = torch.randn(RAW_SIZE, RAW_SIZE), torch.randn(RAW_SIZE, RAW_SIZE)
    out = torch.empty(RAW_SIZE, RAW_SIZE)
    source = torch.ones(RAW_BYTES, dtype=torch.uint8)
    target = torch.ones(RAW_BYTES, dtype=torch.uint8)
    product_s, copy_s = [], []
    for _ in range(2 * NUM_ROUNDS + 1):
        product_s.append(_took_s(lambda: torch.mm(a, b, out=out)))
        copy_s.append(_took_s(lambda: target.copy_(source)))
    return {
        "matmul_gflop_s": round(2 * RAW_SIZE**3 / statistics.median(product_s[1:]) / 1e9, 1),
        "copy_gb_s": round(2 * RAW_BYTES / statistics.median(copy_s[1:]) / 1e9, 1),
    }


def _took_s(work: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _medians(taken: dict[int, list[float]]) -> dict[int, float]:
    return {n: statistics.median(rounds) for n, rounds in taken.items()}


def _say(what: str) -> None:
    print(f"shoal bench engine: {what}", file=sys.stderr)


def _print(found: dict[str, Any]) -> None:
    raw, console = found["raw"], Console()
    table = Table("prompt", "tok/s", "exact tok/s", "GFLOP/s", f"of {raw['matmul_gflop_s']:.0f}", title="prefill")
    for n, gflop_s in found["prefill_gflop_s"].items():
        if n in found["prefill_tok_s"]:
            speeds = (f"{found[key][n]:,}" for key in ("prefill_tok_s", "prefill_exact_tok_s"))
            table.add_row(n, *speeds, f"{gflop_s:.1f}", f"{gflop_s / raw['matmul_gflop_s']:.1%}")
    console.print(table)
    table = Table("prompt", "time", "counted FLOPs", title="prefill with bounded replay, as a part of exact")
    for n, ratio in found["replay_time_ratio"].items():
        table.add_row(n, f"{ratio:.2f}", f"{found['replay_flops_ratio'][n]:.2f}")
    console.print(table)
    columns = ("batch", "tok/s", "with drafts", "tokens a step", "weights GB/s", f"of {raw['copy_gb_s']:.0f}")
    table = Table(*columns, title="decode")
    for n, speed in found["decode_tok_s"].items():
        drafts = (f"{found[key][n]:,}" if n in found[key] else "" for key in _DRAFT_KEYS)
        gb_s = found["decode_weight_gb_s"][n]
        table.add_row(n, f"{speed:,}", *drafts, f"{gb_s:.2f}", f"{gb_s / raw['copy_gb_s']:.1%}")
    console.print(table)
    names = sorted({name for part in found["ops"].values() for name in part}, key=lambda name: -_most(found, name))
    table = Table("operation", *found["ops"], title="milliseconds of a step, and the share of its time")
    for name in names:
        cells = []
        for part in found["ops"].values():
            took_ms = part.get(name, 0.0)
            cells.append(f"{took_ms:.2f} {took_ms / sum(part.values()):6.1%}" if took_ms else "")
        table.add_row(name, *cells)
    table.add_row("all", *(f"{sum(part.values()):.2f}" for part in found["ops"].values()))
    console.print(table)


_DRAFT_KEYS = ("decode_drafts_tok_s", "decode_drafts_tok_step")


def _most(found: dict[str, Any], name: str) -> float:
    return max(float(part.get(name, 0.0) / sum(part.values())) for part in found["ops"].values())
