"""Simulates a workload under each policy, on the same arrivals and the same hardware."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from actors.rules.hit import usable_blocks
from bus.actor import Actor, Envelope, Handler
from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.subjects import RECIPE_TOKENS, SUBMIT, Subject
from run.settings import SettingsError
from run.simulate.arrival import Arrival
from run.simulate.cluster import Cluster
from run.simulate.options import Options, Outcome, Progress, Result
from run.simulate.policies import choice_of
from run.simulate.truth import Truth
from run.virtual import run_virtual
from schemas.message import Role
from schemas.request import End, Failed, Finished, LastWord, Limits, Preempted, Sampling, Submit, Taken, TokensEmitted

WARM_S = 20.0
"""Before the first request: everyone has heard of everyone, and no replica counts as new."""

MAX_SPAN_S = 3 * 86_400.0
"""Longer ones take hours to simulate, whatever is in them: reports go on."""

MAX_OUTPUT = 4096
"""What every request allows its answer, as clients do that do not know how long it will be."""


class Clients(Actor):
    """All clients, in the place of recipes: when each request's first and last tokens came, and how it ended."""

    role = Role.RECIPE

    def __init__(self, id: str, bus: Bus, bulk: Bulk) -> None:
        super().__init__(id, bus)
        self._bulk = bulk
        self.first_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.num_tokens: dict[str, int] = {}
        self.num_cached: dict[str, int] = {}
        self.ends: dict[str, End] = {}
        self.is_done = asyncio.Event()
        self.num_expected = 0

    def handlers(self) -> Mapping[Subject[Any, Any], Handler]:
        return {RECIPE_TOKENS: self._on_tokens}

    async def ask(self, id: str, arrival: Arrival, seed: int) -> None:
        """Send a request on its way."""
        prompt = await self._bulk.wrap(arrival.tokens().astype("<u4").tobytes())
        submit = Submit(
            request_id=id,
            recipe=self.id,
            tenant=arrival.tenant,
            prompt=prompt,
            num_prompt_tokens=arrival.num_tokens,
            sampling=Sampling(temperature=0.0, top_p=1.0, seed=seed),
            limits=Limits(max_tokens=max(MAX_OUTPUT, arrival.num_output + 1)),
        )
        try:
            await self.bus.ask(SUBMIT.any(), submit, timeout_s=5.0)
        except BusError as error:
            self._end(id, Failed(failure=error.failure))

    async def _on_tokens(self, emitted: TokensEmitted, envelope: Envelope) -> Taken:
        now_s, cached, ends = self.now_s(), dict(emitted.cached), dict(emitted.ends)
        for number, id in enumerate(emitted.request_ids):
            if count := emitted.counts[number]:
                self.first_s.setdefault(id, now_s)
                self.ended_s[id] = now_s
                self.num_tokens[id] = self.num_tokens.get(id, 0) + count
            if number in cached:
                self.num_cached[id] = cached[number]
            if number in ends:
                self._end(id, ends[number])
        return Taken()

    def _end(self, id: str, end: LastWord) -> None:
        if not isinstance(end, Preempted):  # which no entrypoint says
            self.ends.setdefault(id, end)
        if len(self.ends) == self.num_expected:
            self.is_done.set()


def simulate(
    arrivals: Sequence[Arrival], options: Options, progress: Progress = lambda policy, done: None
) -> dict[str, Result]:
    """What each policy makes of these requests. Raises SettingsError when they take longer than MAX_SPAN_S."""
    truth = Truth()
    arrivals = paced(arrivals, options, truth)
    if (span_s := arrivals[-1].at_s - arrivals[0].at_s) > MAX_SPAN_S:
        days = MAX_SPAN_S / 86_400
        raise SettingsError(f"the requests come in {span_s:,.0f} simulated seconds, more than {days:g} days")
    found = {}
    for policy in options.policies:
        began_s = time.perf_counter()
        result = run_virtual(_run(arrivals, policy, options, truth, partial(progress, policy)))
        found[policy] = replace(result, wall_s=time.perf_counter() - began_s)
    return found


def paced(arrivals: Sequence[Arrival], options: Options, truth: Truth) -> list[Arrival]:
    """The requests at the load asked for: of nominal replicas, and a store that forgets nothing."""
    first_s, span_s = arrivals[0].at_s, arrivals[-1].at_s - arrivals[0].at_s
    if options.load is None or not span_s:
        return list(arrivals)
    seen, work_s = set[int](), 0.0
    for arrival in arrivals:
        present = next((n for n, block in enumerate(arrival.blocks) if block not in seen), len(arrival.blocks))
        start = usable_blocks(present, arrival.num_tokens) * 128
        work_s += truth.alone_s(arrival.num_tokens, start) - truth.decode_ns(1) / 1e9
        seen.update(arrival.blocks)
    stretch = work_s / (options.load * options.num_prefill * span_s)
    return [replace(arrival, at_s=(arrival.at_s - first_s) * stretch) for arrival in arrivals]


async def _run(
    arrivals: Sequence[Arrival], policy: str, options: Options, truth: Truth, progress: Callable[[float], None]
) -> Result:
    ids = [f"r{number}" for number in range(len(arrivals))]
    answers = {id: (arrival.num_tokens, arrival.answer()) for id, arrival in zip(ids, arrivals, strict=True)}
    blocks = {id: arrival.blocks for id, arrival in zip(ids, arrivals, strict=True)}
    cluster = Cluster(options.seed, truth, answers)
    await cluster.open(
        options.num_prefill, options.num_decode, choice_of(policy, blocks, options.overlap_weight)
    )
    clients = Clients("rc0", await cluster.bus("recipe/rc0"), await cluster.bulk("recipe/rc0"))
    clients.num_expected = len(arrivals)
    await cluster.add(clients)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(WARM_S)
    began_s = loop.time()
    busy_before = [engine.busy_s for engine in cluster.prefill], [engine.busy_s for engine in cluster.decode]
    for number, (id, arrival) in enumerate(zip(ids, arrivals, strict=True)):
        if (wait_s := began_s + arrival.at_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        clients.spawn(clients.ask(id, arrival, number))
        if number % 100 == 0:
            progress(number / len(ids))
    await _done(clients, cluster)
    virtual_s = loop.time() - began_s
    outcomes = [
        _outcome(clients, id, arrival, began_s, truth) for id, arrival in zip(ids, arrivals, strict=True)
    ]
    prefill_s = [engine.busy_s - before for engine, before in zip(cluster.prefill, busy_before[0], strict=True)]
    decode_s = [engine.busy_s - before for engine, before in zip(cluster.decode, busy_before[1], strict=True)]
    await cluster.stop()
    progress(1.0)
    return Result(outcomes, prefill_s, decode_s, virtual_s, 0.0)


async def _done(clients: Clients, cluster: Cluster) -> None:
    """Every request has ended. Raises what ended an actor before that: nobody restarts one here."""
    done = asyncio.create_task(clients.is_done.wait())
    await asyncio.wait([done, *cluster.tasks.values()], return_when=asyncio.FIRST_COMPLETED)
    if not done.done():
        done.cancel()
        for task in cluster.tasks.values():
            if task.done():
                task.result()


def _outcome(clients: Clients, id: str, arrival: Arrival, began_s: float, truth: Truth) -> Outcome:
    end, num_cached = clients.ends[id], clients.num_cached.get(id, 0)
    is_finished = isinstance(end, Finished)
    first_s = clients.first_s.get(id, 0.0)
    num_more = clients.num_tokens.get(id, 0) - 1
    return Outcome(
        arrival_s=arrival.at_s,
        ttft_s=first_s - began_s - arrival.at_s if is_finished else 0.0,
        unloaded_s=truth.alone_s(arrival.num_tokens, num_cached),
        tpot_s=(clients.ended_s[id] - first_s) / num_more if is_finished and num_more > 0 else None,
        num_cached=num_cached,
        num_prompt=arrival.num_tokens,
        failed=None if is_finished else str(end.failure.code) if isinstance(end, Failed) else "cancelled",
    )
