"""`shoal bench experts`: what it gives, and what it costs, that hot experts move while a service decodes.

A whole service in processes of its own, with a decode group of 2, then of 4 ranks, answers questions of one task over
and over, so that some experts have much more to do than others, until its balancer has moved experts and leaves them
where they are. All is seen from outside: reports of the ranks and plans on the bus, and streamed answers.
"""

from __future__ import annotations

import asyncio
import json as json_module
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bus.bus import Delivery, decoder
from bus.server import die_with_parent
from bus.subjects import EXPERTS, PLACE_DECODE
from run.bench.rebalance import Answer, Record, summary
from run.client import GatewayClient, GatewayError
from run.evaluate.questions import sampled
from run.health import on_bus
from run.home import Home
from run.settings import Settings, SettingsError
from schemas.experts import ExpertsUsed, PlaceExperts
from schemas.message import Role

SIZES = (2, 4)
TASK = "transform"
"""Of all tasks the one with the most uneven rows of experts (run/simulate/routing.json)."""
NUM_STREAMS = 32
NUM_REQUESTS = 64
"""Different ones, asked in turn; every second one samples."""
MAX_TOKENS = 512
START_S = 120.0
TOLD_EVERY = 10
"""Reports, each of 16 steps."""
SAME_STEP_S = 0.001
"""A step's tokens come at once, a microsecond or so apart, and the next step's later than this."""

CLUSTER = """
[[process]]
name = "decode"
actors = ["decode/d"]
ep = {size}
redundant = {size}
threads = 1

[[process]]
name = "prefill"
actors = ["prefill/p0"]
threads = 1

[[process]]
name = "front"
actors = [
    "prefill-balancer/pb0", "decode-balancer/db0", "expert-balancer/xb0",
    "entrypoint/e0", "recipe/r0", "gateway/g0",
]
"""


def bench_experts(*, json: bool = False) -> int:
    """Measure and print loads of ranks, times of steps and answers before, while and after experts are moved.

    Takes some minutes. SHOAL_MODEL says which checkpoint is served.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    """
    model, expected = Settings.from_environment().model, dict[int, str]()
    try:
        found = {str(size): summary(asyncio.run(_measure(model, size)), expected) for size in SIZES}
    except GatewayError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    if json:
        print(json_module.dumps(found))
    else:
        _print(found)
    return 0


async def _measure(model: Path, size: int) -> Record:
    """Of one size: what was heard until nothing has been moved for a while. Raises GatewayError, SettingsError."""
    record, is_over = Record(size), threading.Event()

    def on_used(delivery: Delivery) -> None:
        used = decoder(ExpertsUsed).decode(delivery.body)
        if record.report(time.perf_counter(), used) and len(record.reports) % TOLD_EVERY == 0:
            _tell(f"{size} ranks: {record.progress}")
        if record.is_over:
            is_over.set()

    def on_place(delivery: Delivery) -> None:
        record.plan(time.perf_counter(), decoder(PlaceExperts).decode(delivery.body))

    with tempfile.TemporaryDirectory() as folder, _service(Path(folder), model, size) as settings:
        running = Home(settings.home).read()
        assert running is not None
        client = GatewayClient(settings, running.http, "")
        async with on_bus(running.nats_url, name="bench") as bus:
            await bus.wire.subscribe(EXPERTS.at(Role.DECODE).name, on_used)
            await bus.wire.subscribe(PLACE_DECODE.at("d-0").name, on_place)
            try:
                await asyncio.to_thread(_ask_all, client, record, is_over)
            finally:
                is_over.set()
    return record


@contextmanager
def _service(folder: Path, model: Path, size: int) -> Iterator[Settings]:
    """`shoal up` from a home in `folder`: the settings of its clients. Raises SettingsError when it does not start."""
    cluster, ready, output = folder / "cluster.toml", folder / "ready.json", folder / "output.txt"
    cluster.write_text(CLUSTER.format(size=size))
    variables = {"SHOAL_HTTP_PORT": "0", "SHOAL_HOME": str(folder / "home"), "SHOAL_MODEL": str(model)}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "OTEL_"))}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "run.cli", "up", "--cluster", str(cluster), "--ready-file", str(ready)],
            env=others | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends it through us
            preexec_fn=die_with_parent(signal.SIGINT),  # and so does our own end, whatever that is
        )
    try:
        _tell(f"{size} ranks: starting")
        end_s = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end_s:
                raise SettingsError(f"the service did not start:\n{output.read_text(errors='replace').strip()}")
            time.sleep(0.1)
        yield replace(Settings.from_environment(variables), home=folder / "home")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _ask_all(client: GatewayClient, record: Record, is_over: threading.Event) -> None:
    """Ask until it `is_over`, NUM_STREAMS at once. Raises GatewayError."""
    model, numbers = client.first_model(), count()
    bodies = []
    for number, question in enumerate(sampled([TASK], NUM_REQUESTS, "held-out")):
        sampling = {"temperature": 1, "seed": number} if number % 2 else {"temperature": 0}
        bodies.append({**question.example.request, **sampling, "model": model, "stream": True})

    def ask() -> None:
        try:
            while not is_over.is_set():
                number = next(numbers) % NUM_REQUESTS
                record.answers.append(_ask(client, number, {**bodies[number], "max_tokens": MAX_TOKENS}))
        finally:
            is_over.set()  # one that failed ends all

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        for asked in [threads.submit(ask) for _ in range(NUM_STREAMS)]:
            asked.result()


def _ask(client: GatewayClient, number: int, body: dict[str, Any]) -> Answer:
    """The answer to one request, and when its steps came. Raises GatewayError."""
    began_s, text, steps_s = time.perf_counter(), "", list[float]()
    for event in client.stream("/v1/chat/completions", body):
        new = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if new:
            text += new
            now_s = time.perf_counter()
            if not steps_s or now_s - steps_s[-1] > SAME_STEP_S:
                steps_s.append(now_s)
    return Answer(number, text, began_s, time.perf_counter(), steps_s)


def _tell(what: str) -> None:
    print(f"shoal bench experts: {what}", file=sys.stderr)


def _print(found: dict[str, dict[str, Any]]) -> None:
    """A row for each phase, and a line for each plan."""
    columns = ("ranks", "", "max/mean", "worst layer", "step ms", "p90", "of before", "answers", "other")
    table = Table(*columns, title=f"decode for {NUM_STREAMS} clients, all of the task {TASK}")
    notes = []
    for size, one in found.items():
        for phase, of in one["phases"].items():
            loads = [f"{of[key]:.2f}" if key in of else "" for key in ("balance", "worst_layer")]
            table.add_row(
                *(size, phase, *loads, f"{of['step_ms']:.0f}", f"{of['p90_ms']:.0f}"),
                *(f"{of['ratio']:.2f}, {of['p90_ratio']:.2f} x", str(of["num_answers"]), str(of["num_different"])),
            )
        notes += [
            f"{size} ranks, plan {plan['version']}: {plan['num_experts']} experts moved in {plan['num_layers']} of "
            f"{plan['of_layers']} layers; made in {plan['planned_ms']:.0f} ms, in place within {plan['num_steps']} "
            "steps of the report it was made of"
            for plan in one["plans"]
        ]
    Console().print(table)
    print("\n".join(notes or ["no experts were moved"]))
