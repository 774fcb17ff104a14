"""Driving the engine, and measuring what it takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from actors.prefill.batch import Batch
from actors.prefill.job import Job
from actors.prefill.packing import CHUNK_GRAIN, step_room
from actors.prefill.sweep import Prompt, sweep
from actors.rules.cost import step_terms
from actors.rules.meter import Meter
from kernels.engine import Admission, Chunk, Engine, Sampling
from kernels.grouping import GroupError

PASSES = 2
"""The first also warms up, and may compile kernels; and what else a machine does is over sooner than both."""

_KEY = "sweep"
_GREEDY = Sampling(0.0, 1.0, 0)


Step = Callable[[Awaitable[int]], Awaitable[int]]
"""How a step of the engine is awaited."""


async def _alone(work: Awaitable[int]) -> int:
    return await work


async def measure(engine: Engine, meter: Meter, step: Step = _alone) -> None:
    """Compute a few dummy prompts, alone, so that it is known what work costs here, and how many tokens a step has time
    for; in a group each is a `step` of all ranks. Afterwards nothing of them is left; cancelled, or failed, the engine
    is only good to be closed.

    Each is computed PASSES times, and its shortest time counts. Raises ValueError when it cannot compute them.
    """
    info = engine.info
    prompts = sweep(info.max_step_tokens, info.max_tokens)
    passes = [[await _took_ns(engine, prompt, step) for prompt in prompts] for _ in range(PASSES)]
    for prompt, *took_ns in zip(prompts, *passes, strict=True):
        for terms, *each_ns in zip(prompt.terms(), *took_ns, strict=False):  # none where there was no room
            meter.add(terms, min(each_ns))
    room = step_room(meter.cost, info.max_step_tokens)
    most = min(room.num_tokens, max(CHUNK_GRAIN, meter.cost.most_tokens(room.ns, 0)))
    meter.cost = replace(meter.cost, step_tokens=most)


async def _took_ns(engine: Engine, prompt: Prompt, step: Step) -> list[int]:
    """What each step of a dummy prompt takes; none at all when the engine has no room for it."""
    quarter = engine.info.vocab_size // 4
    # Not all the same, as experts are chosen by token; and none of the first and last ones, which are for control, or
    # stand for images that are not there.
    chunks = [quarter + np.arange(num_tokens, dtype=np.uint32) % max(quarter, 1) for num_tokens in prompt.chunks]
    while engine.admit(_KEY, prompt.num_tokens, _GREEDY, bounded_prompt=prompt.num_tokens) is Admission.OK:
        try:
            return [await step(engine.prefill([Chunk(_KEY, tokens)])) for tokens in chunks]
        except GroupError:  # a rank went, or came: those that are there have met again
            continue
        finally:
            engine.free(_KEY)
    return []


async def compute(engine: Engine, batch: Batch, step: Sequence[tuple[Job, Chunk]]) -> None:
    """One step, of which each job has its chunk then. Raises what the engine raises, and nothing is counted."""
    terms = step_terms([job.chunk(len(chunk.tokens)) for job, chunk in step])
    took_ns = await engine.prefill([chunk for _, chunk in step])
    if step:  # else others were served, in a group
        batch.meter.add(terms, took_ns)
    for job, chunk in step:
        job.num_done += len(chunk.tokens)
        batch.num_computed += len(chunk.tokens)
