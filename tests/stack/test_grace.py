"""A decode process that is told to leave with streams open: no client sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import openai
import pytest

from run.cluster import Member
from run.drain import drain_actor
from run.health import find_silent, on_bus
from schemas.message import Role
from tests.stack.conftest import System, until
from tests.stack.test_chaos import MODEL, internal_url

pytestmark = pytest.mark.stack

CLUSTER = """
[[process]]
name = "decode-0"
actors = ["decode/d0"]
threads = 1

[[process]]
name = "others"
actors = ["decode/d1", "prefill/p0"]
threads = 1

[[process]]
name = "front"
actors = ["prefill-balancer/pb0", "decode-balancer/db0", "entrypoint/e0", "recipe/r0", "gateway/g0"]
"""


class Stream:
    """One answer as its client gets it, with the times of its events."""

    def __init__(self, ai: openai.AsyncOpenAI, seed: int, num_tokens: int) -> None:
        self.text, self.times_s = "", list[float]()
        self.task = asyncio.create_task(self._read(ai, seed, num_tokens))

    async def _read(self, ai: openai.AsyncOpenAI, seed: int, num_tokens: int) -> str:
        stream = await ai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Say something long, number {seed}."}],
            max_tokens=num_tokens,
            temperature=1,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            self.times_s.append(time.monotonic())
            for choice in chunk.choices:
                self.text += (choice.delta.content or "") + (getattr(choice.delta, "reasoning_content", None) or "")
        return self.text


def test_a_decode_process_that_leaves_has_the_other_one_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a signal, and by command; it comes back each time."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    system = System(tmp_path, {"SHOAL_GRACE_S": "0.1", "SHOAL_LOG_LEVEL": "INFO"}, cluster=tmp_path / "cluster.toml")

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0, timeout=60) as ai:

            def begin() -> list[Stream]:
                return [Stream(ai, seed, 100) for seed in range(4)]

            async def begun(streams: list[Stream]) -> None:
                await until(lambda: all(len(stream.times_s) > 3 for stream in streams))

            expected = await asyncio.gather(*(stream.task for stream in begin()))
            first = system.ready.pids["decode"]
            streams = begin()
            await begun(streams)
            os.kill(first[0], signal.SIGTERM)
            assert await asyncio.gather(*(stream.task for stream in streams)) == expected
            await until(lambda: system.ready.pids["decode"][0] not in (None, first[0]))
            assert "decode-0   restarting: it has left" in system.output.read_text()
            assert " is moved, at output token " in (system.folder / "home" / "logs" / "decode-0.log").read_text()
            streams = begin()
            await begun(streams)
            asked = Member(Role.DECODE, "d1"), internal_url(system), 0.1
            assert await asyncio.to_thread(drain_actor, *asked) == 0
            assert await asyncio.gather(*(stream.task for stream in streams)) == expected
            last = capsys.readouterr().out.splitlines()[-1]
            async with on_bus(internal_url(system), name="test") as bus:
                while await find_silent(bus, [asked[0]], timeout_s=5.0):
                    pass
            assert last.startswith("decode/d1: 0 left, ") and " 0 moved" not in last, last

    try:
        asyncio.run(main())
    finally:
        assert system.stop() == 0
