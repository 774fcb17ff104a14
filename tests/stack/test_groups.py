"""A decode group of two processes: the answers of one, and what becomes of its requests when a rank is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import openai
import pytest

from bus.bus import Delivery, decoder
from bus.subjects import BROKEN
from run.bench.experts import CLUSTER
from run.health import on_bus
from schemas.experts import GroupBroken
from schemas.message import Role
from tests.stack.chaos import tell
from tests.stack.conftest import System
from tests.stack.test_chaos import CHAT, MODEL, internal_url

pytestmark = pytest.mark.stack

def said(system: System) -> str:
    with openai.OpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0) as ai:
        done = ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, temperature=1, seed=3)  # type: ignore[call-overload]
    return str(done.choices[0].message.content)


def test_a_group_answers_as_one_process_does_and_comes_back_from_a_rank_that_is_gone(
    stack: System, tmp_path: Path
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(size=2))
    system = System(tmp_path, cluster=tmp_path / "cluster.toml")
    expected = said(stack)
    broken: list[GroupBroken] = []

    async def main() -> None:
        assert await asyncio.to_thread(said, system) == expected
        first = system.ready.pids["decode"]
        async with on_bus(internal_url(system), name="test") as bus:

            def on_delivery(delivery: Delivery) -> None:
                broken.append(decoder(GroupBroken).decode(delivery.body))

            await bus.wire.subscribe(BROKEN.at(Role.DECODE).name, on_delivery)
            async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0) as ai:
                running = [asyncio.create_task(tell(ai, kind, 200)) for kind in (1, 2)]  # one on each rank
                await asyncio.sleep(0.5)
                os.kill(first[0], signal.SIGKILL)
                told = await asyncio.gather(*running)
                undisturbed = await asyncio.gather(*(tell(ai, kind, 200) for kind in (1, 2)))
            assert [(one.text, one.code) for one in told] == [(one.text, "") for one in undisturbed]
            print(f"decode group of two, one killed: it took {max(one.gap_s for one in told):.2f} s to go on")
        assert (broken[0].id, broken[0].ranks) == ("d-1", ["d-0", "d-1"])
        assert system.ready.pids["decode"][0] != first[0]

    try:
        asyncio.run(main())
    finally:
        assert system.stop() == 0
