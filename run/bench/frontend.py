"""`shoal bench frontend`: gateway, recipe and entrypoint at work, with an engine that costs nothing.

Real processes and a real broker; only the engine is simulated (`kernels.timed`, zero cost). A step gives a request one
token, or up to four with `--drafts`, and the tokens of a step are one event; those of several steps that had to wait
for each other too. The load comes from this process, which shares the cores with all it measures: so beside each round
it is measured how many messages nats-py alone tells then.
"""

from __future__ import annotations

import asyncio
import json as json_module
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from bus.actor import Actor
from bus.bulk import Bulk
from bus.bus import Bus
from bus.memory_files import MemoryFiles
from bus.server import EmbeddedServer, ServerConfig
from kernels.engine import EngineInfo
from kernels.timed import TimedEngine
from run import build as builders
from run.bench.bus import NUM_TELLS, Raw
from run.bench.load import Load, run_load
from run.cluster import Member, ProcessSpec
from run.health import find_silent, on_bus
from run.settings import LOOPBACK, Settings
from schemas.message import Role
from supervisors.processes import Backoff, Process, Program
from supervisors.tasks import Supervisor

NUM_STREAMS = (1, 32, 128)
NUM_TOKENS = {1: 4096, 32: 512, 128: 512}
NUM_ROUNDS = 3
MOST_ACCEPTED = 4
ENGINE_NAME = "engine-"
"""Of the node with the engines; behind it stands how many tokens a step gives at most."""

FRONT = (Role.GATEWAY, Role.RECIPE, Role.ENTRYPOINT, Role.PREFILL_BALANCER, Role.DECODE_BALANCER)
ENGINE = (Role.PREFILL, Role.DECODE)


def bench_frontend(*, json: bool = False, drafts: bool = False) -> None:
    """Measure and print.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    drafts
        Steps give one to four tokens of a request, not one.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loads, raw_tell_per_s = runner.run(measure(most_accepted=MOST_ACCEPTED if drafts else 1))
    if json:
        keys = ("tokens_per_s", "events_per_s", "ttft_ms_p50", "ttft_ms_p99")
        streams = {str(n): {key: round(getattr(load, key), 3) for key in keys} for n, load in loads.items()}
        print(json_module.dumps({"streams": streams, "raw_tell_per_s": round(raw_tell_per_s)}))
        return
    title = f"front end, {f'one to {MOST_ACCEPTED} tokens' if drafts else 'one token'} per step"
    table = Table("streams", "tokens/s", "events/s", "TTFT p50 ms", "TTFT p99 ms", title=title)
    for n, load in loads.items():
        speeds = (f"{load.tokens_per_s:,.0f}", f"{load.events_per_s:,.0f}")
        table.add_row(str(n), *speeds, f"{load.ttft_ms_p50:.1f}", f"{load.ttft_ms_p99:.1f}")
    Console().print(table)
    print(f"nats-py alone, meanwhile: {raw_tell_per_s:,.0f} messages/s")


async def measure(
    num_streams: tuple[int, ...] = NUM_STREAMS, most_accepted: int = 1
) -> tuple[Mapping[int, Load], float]:
    """The median round (by tokens/s) for each number of streams; messages/s of nats-py alone, the median of all."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(ServerConfig.write(Path(folder), port=0))
        await server.start()
        url = server.config.url(server.config.internal)
        port = _free_port()
        engine = f"{ENGINE_NAME}{most_accepted}"
        programs = [_program("front", FRONT, url, port), _program(engine, ENGINE, url, port)]
        children = [_process(program).child() for program in programs]
        raw, raw_tells_s = await Raw.start(server.config), list[float]()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(Supervisor("bench", children).run(lambda: ready.set_result(None)))
        try:
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            await _until_all_answer(url)
            loads = {n: await _median(port, n, raw, raw_tells_s) for n in num_streams}
            return loads, NUM_TELLS / statistics.median(raw_tells_s)
        finally:
            await raw.stop()
            task.cancel()
            await asyncio.wait([task])
            await server.stop()


async def _median(port: int, num_streams: int, raw: Raw, raw_tells_s: list[float]) -> Load:
    rounds = []
    for _ in range(NUM_ROUNDS + 1):
        num_tokens = NUM_TOKENS[num_streams]
        rounds.append(await run_load(LOOPBACK, port, "shoal-tiny", num_streams=num_streams, num_tokens=num_tokens))
        started_s = time.perf_counter()
        await raw.tell()
        raw_tells_s.append(time.perf_counter() - started_s)
    rounds = rounds[1:]  # the first one warms up
    return sorted(rounds, key=lambda load: load.tokens_per_s)[NUM_ROUNDS // 2]


async def _until_all_answer(url: str) -> None:
    async with on_bus(url, name="bench") as bus:
        silent = await find_silent(bus, [Member(role, "x0") for role in (*FRONT, *ENGINE)], timeout_s=30.0)
    if silent:
        raise TimeoutError(f"no answer from {', '.join(map(str, silent))}")


def _program(name: str, roles: tuple[Role, ...], url: str, port: int) -> Program:
    members = [f"{role}/x0" for role in roles]
    environment = {"SHOAL_NATS_URL": url, "SHOAL_HTTP_PORT": str(port), "SHOAL_API_KEYS": ""}
    return Program(
        name, [sys.executable, "-m", "run.bench.frontend", name, *members], members=members, environment=environment
    )


def _process(program: Program) -> Process:
    return Process(program, backoff=Backoff(random.Random(0)), on_exit=lambda _: None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def build_timed(member: Member, bus: Bus, bulk: Bulk, spec: ProcessSpec, settings: Settings) -> Actor:
    """As `run.build.build`, but with engines that cost nothing."""
    most_accepted = int(spec.name.removeprefix(ENGINE_NAME)) if spec.name.startswith(ENGINE_NAME) else 1
    if member.role is Role.PREFILL:
        from actors.prefill.actor import Prefill

        return Prefill(member.id, bus, bulk, free_engine(settings.model, most_accepted), MemoryFiles())
    if member.role is Role.DECODE:
        from actors.decode.actor import Decode

        engine = free_engine(settings.model, most_accepted)
        return Decode(member.id, bus, bulk, engine, tokenizer=settings.model / "tokenizer.json")
    return builders.build(member, bus, bulk, spec, settings)


def free_engine(model: Path, most_accepted: int) -> TimedEngine:
    """A timed engine at zero cost that never ends by itself and emits plain ASCII words."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = {id: tokenizer.decode([id], skip_special_tokens=False) for id in range(tokenizer.get_vocab_size())}
    words = [id for id, text in texts.items() if text.strip().isascii() and text.strip().isalpha()]
    info = EngineInfo(
        model="shoal-tiny",
        layout="timed",
        vocab_size=tokenizer.get_vocab_size(),
        eos_token=1,
        max_tokens=1 << 20,
        num_slots=256,
        max_step_tokens=1 << 16,
        capacity_tokens=256 << 20,
        space="timed",
        block_bytes=64,
    )
    return TimedEngine(info, words, most_accepted=most_accepted)


def main() -> int:
    """One node of the benchmark: `python -m run.bench.frontend NAME ROLE/ID…`."""
    from run.node import run_node

    name, *members = sys.argv[1:]
    spec = ProcessSpec(name, tuple(Member.parse(member) for member in members), num_threads=1)
    return run_node(spec, Settings.from_environment(), build_timed)


if __name__ == "__main__":
    sys.exit(main())
