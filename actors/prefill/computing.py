"""Driving the engine, and measuring what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.prefill.batch import Batch
from actors.prefill.job import Job
from actors.prefill.packing import CHUNK_GRAIN, step_room
from actors.prefill.sweep import sweep
from actors.rules.cost import step_terms
from actors.rules.meter import Meter
from kernels.engine import Admission, Chunk, Engine, Sampling

_KEY = "sweep"


async def measure(engine: Engine, meter: Meter) -> None:
    """Compute a few dummy prompts, alone, so that it is known what work costs here, and how many tokens a step has time
    for. Afterwards nothing of them is left; cancelled, or failed, the engine is only good to be closed.

    Raises ValueError when it cannot compute them.
    """
    info = engine.info
    for prompt in sweep(info.max_step_tokens, info.max_tokens):
        num_tokens, greedy = prompt.num_tokens, Sampling(0.0, 1.0, 0)
        if engine.admit(_KEY, num_tokens, greedy, bounded_prompt=num_tokens) is not Admission.OK:
            continue
        for num_tokens, terms in zip(prompt.chunks, prompt.terms(), strict=True):
            # Not all the same, as experts are chosen by token; and none of the first and last ones, which are for
            # control, or stand for images that are not there.
            quarter = info.vocab_size // 4
            tokens = quarter + np.arange(num_tokens, dtype=np.uint32) % max(quarter, 1)
            took_ns = await engine.prefill([Chunk(_KEY, tokens)])
            if prompt.is_measured:
                meter.add(terms, took_ns)
        engine.free(_KEY)
    room = step_room(meter.cost, info.max_step_tokens)
    most = min(room.num_tokens, max(CHUNK_GRAIN, meter.cost.most_tokens(room.ns, 0)))
    meter.cost = replace(meter.cost, step_tokens=most)


async def compute(engine: Engine, batch: Batch, step: Sequence[tuple[Job, Chunk]]) -> None:
    """One step, of which each job has its chunk then. Raises ValueError, and nothing is counted."""
    terms = step_terms([job.chunk(len(chunk.tokens)) for job, chunk in step])
    batch.meter.add(terms, await engine.prefill([chunk for _, chunk in step]))
    for job, chunk in step:
        job.num_done += len(chunk.tokens)
        batch.num_computed += len(chunk.tokens)
