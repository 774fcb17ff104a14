"""A decode group of two processes: the answers of one, and it goes on when a rank is killed, and when it is back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import openai
import pytest

from bus.bus import Delivery, decoder
from bus.subjects import BROKEN, LOAD
from run.bench.experts import CLUSTER
from run.health import on_bus
from schemas.experts import GroupBroken
from schemas.message import Role
from schemas.routing import LoadReported
from tests.stack.chaos import tell
from tests.stack.conftest import System
from tests.stack.test_chaos import CHAT, MODEL, internal_url

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]

def said(system: System) -> str:
    with openai.OpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0) as ai:
        done = ai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, temperature=1, seed=3)  # type: ignore[call-overload]
    return str(done.choices[0].message.content)


def test_a_group_answers_as_one_process_does_and_goes_on_without_a_rank_and_with_its_successor(
    stack: System, tmp_path: Path
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(size=2))
    system = System(tmp_path, cluster=tmp_path / "cluster.toml")
    expected = said(stack)
    broken: list[GroupBroken] = []
    reports: dict[str, LoadReported] = {}

    async def main() -> None:
        assert await asyncio.to_thread(said, system) == expected
        pids = system.ready.pids["decode"]
        async with on_bus(internal_url(system), name="test") as bus:

            def on_delivery(delivery: Delivery) -> None:
                broken.append(decoder(GroupBroken).decode(delivery.body))

            def on_report(delivery: Delivery) -> None:
                report = decoder(LoadReported).decode(delivery.body)
                reports[report.id] = report

            await bus.wire.subscribe(BROKEN.at(Role.DECODE).name, on_delivery)
            await bus.wire.subscribe(LOAD.at(Role.DECODE).name, on_report)
            async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0) as ai:
                running = [asyncio.create_task(tell(ai, kind, 200)) for kind in (1, 2)]  # one on each rank
                await asyncio.sleep(0.5)
                os.kill(pids[0], signal.SIGKILL)
                told = await asyncio.gather(*running)
                async with asyncio.timeout(30):
                    while [one.detail.get("group_size") for one in reports.values()] != [2.0, 2.0]:
                        await asyncio.sleep(0.1)
                undisturbed = await asyncio.gather(*(tell(ai, kind, 200) for kind in (1, 2)))
            assert [(one.text, one.code) for one in told] == [(one.text, "") for one in undisturbed]
            gaps_s = sorted(one.gap_s for one in told)
            print(f"decode group of two, one killed: the longest gaps were {gaps_s[0]:.2f} s and {gaps_s[1]:.2f} s")
        assert [(one.id, one.ranks) for one in broken] == [("d-1", ["d-0"])]
        assert [new == old for new, old in zip(system.ready.pids["decode"], pids, strict=True)] == [False, True]

    try:
        asyncio.run(main())
    finally:
        assert system.stop() == 0
