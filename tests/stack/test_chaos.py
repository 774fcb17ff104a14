"""Kills, vanished clients, and the end of the whole system."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import openai
import pytest

from bus.bus import Bus
from run.health import collect_loads, on_bus
from run.home import Home
from schemas.message import Role
from tests.stack.chaos import chaos, chaos_system, tell
from tests.stack.conftest import SERVING, System, is_alive, until

pytestmark = pytest.mark.stack

MODEL = "shoal-tiny"
CHAT = [{"role": "user", "content": "Say something long."}]


def internal_url(system: System) -> str:
    running = Home(system.folder / "home").read()
    assert running is not None
    return running.nats_url


async def counts(bus: Bus) -> dict[str, int]:
    """Requests each actor holds, by role; an actor that is missing counts as one."""
    reports = {report.role: report for report in await collect_loads(bus, wait_s=0.2)}
    roles = [role for role in SERVING if role is not Role.GATEWAY]
    return {role: reports[role].num_running + reports[role].num_waiting if role in reports else 1 for role in roles}


async def until_free(system: System) -> None:
    """Wait until no actor holds a request."""
    async with on_bus(internal_url(system), name="test") as bus, asyncio.timeout(30):
        while any((await counts(bus)).values()):
            await asyncio.sleep(0.05)


async def answer(ai: openai.AsyncOpenAI, max_tokens: int, seed: int = 1) -> tuple[int, str]:
    """(events, "" or the error's code) of one stream."""
    num_events = 0
    try:
        stream = await ai.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=max_tokens, temperature=1, seed=seed, stream=True
        )
        async for _ in stream:
            num_events += 1
    except openai.APIError as error:
        return num_events, str(error.code)
    return num_events, ""


def test_an_http_client_that_leaves_frees_its_request_everywhere(stack: System) -> None:
    async def main() -> None:
        host, port = stack.http.removeprefix("http://").split(":")
        body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 4000, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"data: ")
        async with on_bus(internal_url(stack), name="test") as bus:
            held = await counts(bus)
            assert held[Role.ENTRYPOINT] == 1 and held[Role.RECIPE] == 1
        writer.close()
        await until_free(stack)

    asyncio.run(main())


def test_a_nats_client_that_vanishes_frees_its_request_everywhere(stack: System) -> None:
    async def main() -> None:
        async with stack.client() as client:
            inbox = client.new_inbox()
            subscription = await client.subscribe(inbox)
            body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 4000, "stream": True}).encode()
            await client.publish("shoal.api.chat_completions", body, reply=inbox)
            await subscription.next_msg(timeout=30)
        await until_free(stack)

    asyncio.run(main())


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
def test_a_killed_process_is_restarted_and_its_requests_go_on(stack: System, role: str) -> None:
    """But for those of a gateway: their connections are gone."""

    async def main() -> None:
        victim = stack.pid(role)
        others = {name: pids for name, pids in stack.ready.pids.items() if victim not in pids}
        async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0, timeout=60) as ai:
            running = [asyncio.create_task(answer(ai, 120, seed)) for seed in range(6)]
            await asyncio.sleep(0.5)
            os.kill(victim, signal.SIGKILL)
            for num_events, code in await asyncio.gather(*running):
                assert role == "gateway" or (code == "" and num_events > 1)
            await until(lambda: stack.pid(role) != victim)
            await until_free(stack)
        async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0, timeout=60) as ai:
            num_events, code = await answer(ai, 5)
            assert code == "" and num_events > 0
        assert {name: stack.ready.pids[name] for name in others} == others

    asyncio.run(main())


def test_a_stopped_process_is_found_out(stack: System) -> None:
    """SIGSTOP: its sockets stay open, it just makes no progress, and only unanswered pings tell."""

    async def main() -> None:
        victim = stack.pid("decode")
        async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0, timeout=60) as ai:
            running = [asyncio.create_task(tell(ai, 1, 120)) for _ in range(2)]
            await asyncio.sleep(0.5)
            os.kill(victim, signal.SIGSTOP)
            told = await asyncio.gather(*running)
            assert [(one.text, one.code) for one in told] == [((await tell(ai, 1, 120)).text, "")] * 2
            await until(lambda: stack.pid("decode") != victim)
            assert not is_alive(victim)
            assert (await answer(ai, 5))[1] == ""

    asyncio.run(main())


@pytest.mark.timeout(300)
def test_streams_go_on_while_processes_are_killed_and_stopped_and_nothing_survives_a_killed_root(
    tmp_path: Path,
) -> None:
    """After Ctrl-C nothing does either: whatever stops a system here waits for that."""
    system = chaos_system(tmp_path)
    try:
        kills = ["entrypoint", "decode", "broker", "prefill"]
        outcome = asyncio.run(chaos(system, num_streams=104, max_tokens=64, kills=kills, pause_s=1.0))
    finally:
        status = system.stop(signal.SIGKILL)
    print(outcome)
    assert outcome.num_same + outcome.num_other == 104 and outcome.failed == {}
    assert outcome.num_other <= outcome.num_approximate and outcome.num_amid > 0
    assert status == -signal.SIGKILL
