"""Streams, while somebody kills, stops and drains what computes them: `python -m tests.stack.chaos --help`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import openai

from run.health import collect_loads, on_bus
from run.home import Home
from schemas.message import Role
from tests.stack.conftest import System

MODEL = "shoal-tiny"
NUM_KINDS = 12
CLUSTER = """
[[process]]
name = "prefill-0"
actors = ["prefill/p0"]
threads = 1

[[process]]
name = "prefill-1"
actors = ["prefill/p1"]
threads = 1

[[process]]
name = "decode-0"
actors = ["decode/d0"]
threads = 1

[[process]]
name = "decode-1"
actors = ["decode/d1"]
threads = 1

[[process]]
name = "entry"
actors = ["entrypoint/e0"]

[[process]]
name = "front"
actors = [
    "prefill-balancer/pb0", "decode-balancer/db0", "metadata/m0", "kvstore/k0", "writer/w0",
    "recipe/r0", "gateway/g0",
]
"""


@dataclass(frozen=True)
class Told:
    """What a client was told: the text, the error's code if it failed, and the longest wait between two chunks."""

    text: str
    code: str = ""
    gap_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of all streams: `num_same` as the undisturbed ones, `num_other`, those that failed by code; how many the
    entrypoint recorded, since it was killed last, as approximate, and as lost with a replica; waits in order."""

    num_same: int
    num_other: int
    failed: dict[str, int]
    num_approximate: int
    num_amid: int
    gaps_s: list[float]

    def __str__(self) -> str:
        waits = f"longest waits p50 {self.gaps_s[len(self.gaps_s) // 2]:.2f} s, max {self.gaps_s[-1]:.2f} s"
        return (
            f"{self.num_same} streams as undisturbed, {self.num_other} otherwise ({self.num_approximate} recorded as "
            f"approximate), failed {self.failed or 'none'}; {self.num_amid} kills amid them; {waits}"
        )


def chaos_system(folder: Path) -> System:
    """Two prefill and two decode processes, one for the entrypoint, and the rest in one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cluster.toml").write_text(CLUSTER)
    return System(folder, {"SHOAL_GRACE_S": "0.2"}, cluster=folder / "cluster.toml", start_s=200.0)


async def tell(ai: openai.AsyncOpenAI, kind: int, max_tokens: int) -> Told:
    """One stream. Kinds differ in seed and prompt; a third of the prompts are of some cached blocks."""
    words = "Say something long." + " and then more" * (60 if kind % 3 == 0 else kind)
    text, gap_s, last_s = "", 0.0, 0.0
    try:
        stream = await ai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": words}],
            max_tokens=max_tokens,
            temperature=1,
            seed=kind,
            stream=True,
        )
        async for chunk in stream:
            now_s = time.monotonic()
            gap_s, last_s = max(gap_s, now_s - last_s if last_s else 0.0), now_s
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    except openai.APIError as error:
        return Told(text, str(error.code or type(error).__name__), gap_s)
    return Told(text, "", gap_s)


async def disturb(
    system: System, chance: random.Random, pause_s: float, kills: list[str], streams: list[asyncio.Task[Told]]
) -> int:
    """Kill these roles in turn, and between two of them stop something for a moment, or have it leave. How many were
    killed amid streams."""
    num_amid = 0
    for number, role in enumerate(kills):
        await asyncio.sleep(pause_s * chance.uniform(0.5, 1.5))
        num_amid += not all(stream.done() for stream in streams)
        _signal(chance.choice(system.ready.pids[role]), signal.SIGKILL)
        await asyncio.sleep(pause_s * chance.uniform(0.2, 0.8))
        stopped = chance.choice(system.ready.pids["prefill"] + system.ready.pids["decode"])
        if number % 2:
            _signal(stopped, signal.SIGTERM)
            continue
        _signal(stopped, signal.SIGSTOP)
        await asyncio.sleep(chance.uniform(0.2, 2.0))
        _signal(stopped, signal.SIGCONT)
    return num_amid


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already, and its successor is on its way
        os.kill(pid, number)


async def chaos(system: System, *, num_streams: int, max_tokens: int, kills: list[str], pause_s: float) -> Outcome:
    """All streams at once, disturbed; each is compared with the same one undisturbed."""
    running = Home(system.folder / "home").read()
    assert running is not None
    async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0, timeout=300) as ai:
        truth = await asyncio.gather(*(tell(ai, kind, max_tokens) for kind in range(NUM_KINDS)))
        assert not any(one.code for one in truth)
        streams = [asyncio.create_task(tell(ai, i % NUM_KINDS, max_tokens)) for i in range(num_streams)]
        disturbing = asyncio.create_task(disturb(system, random.Random(1), pause_s, kills, streams))
        told = await asyncio.gather(*streams)
        num_amid = await disturbing
    async with on_bus(running.nats_url, name="test") as bus:
        loads = await collect_loads(bus, wait_s=0.2)
    detail = next(load.detail for load in loads if load.role is Role.ENTRYPOINT)
    whole = [one.text == truth[i % NUM_KINDS].text for i, one in enumerate(told) if not one.code]
    return Outcome(
        num_same=sum(whole),
        num_other=len(whole) - sum(whole),
        failed=dict(Counter(one.code for one in told if one.code)),
        num_approximate=int(detail["approximate"]),
        num_amid=num_amid,
        gaps_s=sorted(one.gap_s for one in told),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=600, help="of each")
    parser.add_argument("--kills", type=int, default=12, help="of each kind of process in turn")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two of them")
    asked = parser.parse_args()
    kills = [("entrypoint", "decode", "broker", "prefill", "decode")[number % 5] for number in range(asked.kills)]
    with tempfile.TemporaryDirectory() as folder:
        system = chaos_system(Path(folder))
        try:
            work = chaos(system, num_streams=asked.streams, max_tokens=asked.tokens, kills=kills, pause_s=asked.pause)
            print(asyncio.run(work))
        finally:
            system.stop()


if __name__ == "__main__":
    main()
