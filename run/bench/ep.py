"""`shoal bench ep`: what decoding costs when the experts are spread over 1, 2 and 4 processes of this machine.

As many requests in all at each size, shared by the ranks. A rank computes with one thread: with more ranks than cores
they wait for each other's turns, which is time of exchanges here.
"""

from __future__ import annotations

import asyncio
import json as json_module
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kernels.engine import Admission, Chunk, Sampling
from kernels.environment import compute_environment
from kernels.group import GroupSpec
from kernels.local import LocalEngine
from run.settings import Settings, SettingsError

SIZES = (1, 2, 4)
NUM_STEPS = 48
PROMPT_TOKENS = 64
TIMEOUT_S = 60.0

_GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0)


def bench_ep(model: Path | None = None, /, *, json: bool = False, batch: int = 16) -> None:
    """Measure and print tokens a second, time of a step, and what a rank holds, with experts over 1, 2 and 4 ranks.

    Parameters
    ----------
    model
        A checkpoint folder; SHOAL_MODEL, else the bundled one, by default.
    json
        Print one JSON object instead of a table.
    batch
        Requests in all, shared by the ranks; a multiple of 4.
    """
    if batch < max(SIZES) or batch % max(SIZES):
        raise SettingsError(f"--batch {batch}: give a multiple of {max(SIZES)}")
    folder = model or Settings.from_environment().model
    found = {str(size): _measure(folder, size, batch) for size in SIZES}
    if json:
        print(json_module.dumps(found))
    else:
        _print(found, batch)


def _measure(folder: Path, size: int, batch: int) -> dict[str, float]:
    """Of one size: every rank is a process of its own."""
    print(f"shoal bench ep: {size} ranks", file=sys.stderr)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        spec = GroupSpec(rank, size, TIMEOUT_S) if size > 1 else None
        processes.append(context.Process(target=_rank, args=(folder, spec, batch // size, theirs), daemon=True))
        pipes.append(ours)
    for process in processes:
        process.start()
    try:
        if size > 1:  # they meet when all are loaded
            address = [pipe.recv() for pipe in pipes][0]
            for pipe in pipes:
                pipe.send(address)
        ranks: list[dict[str, Any]] = [pipe.recv() for pipe in pipes]
    except EOFError:
        raise SettingsError(f"a rank of {size} ended before it had measured anything") from None
    finally:
        for process in processes:
            process.join(TIMEOUT_S)
    steps_s = np.array([rank["steps_s"] for rank in ranks]).max(0)
    moving_s = np.array([rank["moving_s"] for rank in ranks]).max(0)
    total_s = float(steps_s.sum())
    found = {
        "tok_s": sum(rank["num_tokens"] for rank in ranks) / total_s,
        "step_ms": 1e3 * statistics.median(steps_s),
        "exchange_share": statistics.mean(rank["exchange_s"] for rank in ranks) / total_s,
        "expert_bytes": max(rank["expert_bytes"] for rank in ranks),
    }
    if size > 1:
        found["empty_step_ms"] = 1e3 * statistics.median(rank["empty_s"] for rank in ranks)
        found["moving_step_ms"] = 1e3 * statistics.median(moving_s)
        found["moving_ratio"] = float(statistics.median(moving_s) / statistics.median(steps_s))
    return {key: round(float(value), 3) for key, value in found.items()}


def _rank(folder: Path, spec: GroupSpec | None, num_requests: int, pipe: Connection) -> None:
    import os

    os.environ.update(compute_environment(1))
    pipe.send(asyncio.run(_run(folder, spec, num_requests, pipe)))


async def _run(folder: Path, spec: GroupSpec | None, num_requests: int, pipe: Connection) -> dict[str, Any]:
    engine = LocalEngine(folder, num_slots=num_requests, max_step_tokens=512, group=spec)
    await engine.start()
    member = engine.group
    if member is not None and spec is not None:
        pipe.send(member.listen())
        await member.meet(1, spec.rank, spec.size, pipe.recv())
    keys = [f"r{number}" for number in range(num_requests)]
    rng = np.random.default_rng(0 if spec is None else spec.rank)
    for key in keys:
        prompt = rng.integers(engine.info.vocab_size // 4, engine.info.vocab_size // 2, PROMPT_TOKENS)
        room = PROMPT_TOKENS + 16 * NUM_STEPS
        assert engine.admit(key, room, _GREEDY, bounded_prompt=PROMPT_TOKENS) is Admission.OK
        await engine.prefill([Chunk(key, prompt.astype(np.uint32))])
    await _steps(engine, keys, 4)
    before_ns = member.exchange_ns if member else 0
    steps_s, num_tokens = await _steps(engine, keys, NUM_STEPS)
    exchange_ns = member.exchange_ns - before_ns if member else 0
    empty_s, moving_s = 0.0, [0.0]
    if member is not None:
        empty, _ = await _steps(engine, [], NUM_STEPS)
        empty_s = statistics.median(empty)
        moving = asyncio.create_task(_move(engine))
        moving_s, _ = await _steps(engine, keys, NUM_STEPS)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        assert member.version > 0, "nothing has moved"
    experts = engine.expert_bytes
    await engine.close()
    return {
        "steps_s": steps_s,
        "num_tokens": num_tokens,
        "exchange_s": exchange_ns / 1e9,
        "expert_bytes": experts,
        "empty_s": empty_s,
        "moving_s": moving_s,
    }


async def _steps(engine: LocalEngine, keys: Sequence[str], num: int) -> tuple[list[float], int]:
    """What each step takes, and the tokens of all."""
    took_s, num_tokens = [], 0
    for _ in range(num):
        start_s = time.perf_counter()
        num_tokens += sum(len(new) for new in await engine.decode(keys))
        took_s.append(time.perf_counter() - start_s)
    return took_s, num_tokens


async def _move(engine: LocalEngine) -> None:
    """All experts, again and again: every rank goes on with those of the next."""
    assert engine.group is not None
    for version in range(1, 1000):
        await engine.group.rearrange(version, [np.roll(one, 1, 0) for one in engine.group.places])


def _print(found: dict[str, dict[str, float]], batch: int) -> None:
    columns = ("ranks", "tok/s", "step ms", "in exchanges", "experts a rank", "empty step ms", "step while moving")
    table = Table(*columns, title=f"decode of {batch} requests, experts spread over ranks")
    for size, one in found.items():
        table.add_row(
            size,
            f"{one['tok_s']:,.0f}",
            f"{one['step_ms']:.1f}",
            f"{one['exchange_share']:.0%}",
            f"{one['expert_bytes'] / 1e6:.2f} MB",
            f"{one['empty_step_ms']:.2f}" if "empty_step_ms" in one else "",
            f"{one['moving_ratio']:.2f} x" if "moving_ratio" in one else "",
        )
    Console().print(table)
