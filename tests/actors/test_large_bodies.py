"""Bodies too large for a message: they go beside the bus, only so many at once, and disturb nobody."""

from __future__ import annotations

import asyncio
import json

import pytest

from actors.gateway import intake
from actors.gateway.actor import MAX_BODY_BYTES
from actors.recipe.card import ModelCard
from bus.bulk import INLINE_BYTES, MemoryBulk
from bus.subjects import MAX_MESSAGE_BYTES
from schemas.message import Role
from schemas.request import CancelReason
from tests.actors.clients import BODIES, CHAT_PATH, error_of, http
from tests.actors.edge import STOP, STREAM, Edge, content, edge, silent, submitted
from tests.conftest import Run


def filled(path: str, size_bytes: int) -> bytes:
    """A body of a path with so much text."""
    text = "word " * (size_bytes // 5)
    content = {"input": text} if "input" in BODIES[path] else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({**BODIES[path], **content}).encode()


def is_nothing_held(system: Edge) -> bool:
    return system.gateway._bulk.num_offers == 0 and system.gateway._intake.num_bytes == 0


def test_many_large_bodies_are_answered_and_a_stream_runs_on(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_BYTES", 3 * MAX_BODY_BYTES)

    async def main() -> None:
        async with silent(card) as system, http(system) as client:
            sizes: list[int] = []
            await system.entrypoint.bus.wire.subscribe(
                f"shoal.{Role.RECIPE}.*.call", lambda delivery: sizes.append(len(delivery.body))
            )
            tokens = system.entrypoint.answer

            async def begin() -> str:
                [id] = await submitted(system.entrypoint)
                await system.entrypoint.emit(id, tokens[:1])
                return id

            beginning = asyncio.create_task(begin())
            async with client.stream("POST", CHAT_PATH, json=STREAM) as stream:
                id = await beginning
                lines = stream.aiter_lines()
                first = await anext(lines)
                paths = [path for path in BODIES for _ in range(6)][:16]
                bodies = {path: filled(path, MAX_BODY_BYTES - 1000) for path in BODIES}
                answers = await asyncio.gather(*(client.post(path, content=bodies[path]) for path in paths))
                await system.entrypoint.emit(id, tokens[1:], STOP)
                rest = [line async for line in lines]
            for path, answer in zip(paths, answers, strict=True):
                message = error_of(path, answer.json())
                assert ("maximum context length" if answer.status_code == 400 else "retry later") in message
            assert {answer.status_code for answer in answers} == {400, 503}
            events = [json.loads(line[6:]) for line in [first, *rest] if line.startswith("data: {")]
            assert content(events) == "Hello there!"
            assert max(sizes) <= MAX_MESSAGE_BYTES
            assert is_nothing_held(system)

    run_async(main())


def test_a_body_beside_the_bus_is_read_whole(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            for path, body in BODIES.items():
                padded = json.dumps(body).encode() + b" " * (INLINE_BYTES + 1)
                assert (await client.post(path, content=padded)).status_code == 200
            count = json.dumps(BODIES["/v1/messages"]).encode() + b" " * (INLINE_BYTES + 1)
            assert (await client.post("/v1/messages/count_tokens", content=count)).json()["input_tokens"] > 0
            assert is_nothing_held(system)

    run_async(main())


def test_a_body_that_cannot_be_pulled_is_a_typed_failure(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            bulk = system.gateway._bulk
            assert isinstance(bulk, MemoryBulk)
            bulk.cut()
            for path in [*BODIES, "/v1/messages/count_tokens"]:
                answer = await client.post(path, content=b" " * (INLINE_BYTES + 1))
                assert answer.status_code == 502
                error_of(path, answer.json())
            assert is_nothing_held(system)
            assert not system.entrypoint.submitted
            assert (await client.post(CHAT_PATH, json=BODIES[CHAT_PATH])).status_code == 200

    run_async(main())


def test_small_bodies_are_taken_while_large_ones_fill_the_intake(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_BYTES", 0)

    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            for path, body in BODIES.items():
                padded = json.dumps(body).encode() + b" " * intake.FREE_BYTES
                refused = await client.post(path, content=padded)
                assert refused.status_code == 503 and "retry later" in error_of(path, refused.json())
                assert (await client.post(path, content=padded[: intake.FREE_BYTES])).status_code == 200

    run_async(main())


def test_a_stream_holds_nothing_of_its_body(run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_BYTES", INLINE_BYTES * 2)

    async def main() -> None:
        async with silent(card) as system, http(system) as client:
            for num in range(1, 4):
                padded = json.dumps(STREAM).encode() + b" " * (INLINE_BYTES + 1)
                posting = asyncio.create_task(client.post(CHAT_PATH, content=padded))
                await submitted(system.entrypoint, num)
                async with asyncio.timeout(10):
                    while not is_nothing_held(system):
                        await asyncio.sleep(0)
                posting.cancel()
                await asyncio.wait([posting])
            await system.entrypoint.until(lambda: len(system.entrypoint.cancelled) == 3)
            assert {c.reason for c in system.entrypoint.cancelled.values()} == {CancelReason.CLIENT_GONE}

    run_async(main())
