"""The gateway among bad input, wrong keys, clients that leave, and recipes that die."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from actors.gateway import actor as gateway_actor
from actors.gateway import exchange
from actors.gateway.actor import MAX_BODY_BYTES
from actors.gateway.keys import Keys, KeysError
from actors.recipe.card import ModelCard
from actors.rules.tenants import Tenants
from bus.bus import Delivery
from bus.memory import MemoryWire
from bus.subjects import EXITED
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.request import CancelReason, Failed, Finished, FinishReason
from tests.actors.clients import BODIES, CHAT_PATH, MESSAGES, MESSAGES_PATH, error_of, http, sdks
from tests.actors.edge import edge, silent, submitted
from tests.conftest import Run

# Bad input


BAD: list[tuple[str, bytes, int]] = [
    (path, raw, http_status)
    for path, body in BODIES.items()
    for raw, http_status in (
        (b"", 400),
        (b"{", 400),
        (b"\x00\xff", 400),
        (b"[]", 400),
        (json.dumps(body).encode()[:-9], 400),
        (json.dumps({**body, "model": "gpt"}).encode(), 404),
        (json.dumps({**body, "temperature": "hot"}).encode(), 400),
        (json.dumps({**body, "foo": 1}).encode(), 400),
        (b"[" * 500_000, 400),
    )
]
BAD += [
    (CHAT_PATH, json.dumps({"model": "tiny", "messages": []}).encode(), 400),
    (CHAT_PATH, json.dumps({**BODIES[CHAT_PATH], "max_tokens": 5000}).encode(), 400),
    (
        CHAT_PATH,
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "word " * 420_000}]}).encode(),
        400,
    ),
    (
        MESSAGES_PATH,
        json.dumps({**BODIES[MESSAGES_PATH], "messages": [{"role": "user", "content": [{"type": "image"}]}]}).encode(),
        400,
    ),
]


def test_bad_bodies(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            for path, raw, http_status in BAD:
                answer = await client.post(path, content=raw, headers={"x-request-id": "mine"})
                assert answer.status_code == http_status, (path, raw[:80], answer.text)
                assert error_of(path, answer.json())
                assert answer.headers["x-request-id"] == "mine"
                assert answer.headers["x-should-retry"] == "false"
            assert not system.entrypoint.submitted
            assert (await client.post(CHAT_PATH, json=BODIES[CHAT_PATH])).status_code == 200

    run_async(main())


def test_a_body_over_the_limit(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            for path in BODIES:
                answer = await client.post(path, content=b"x" * (MAX_BODY_BYTES + 1))
                assert answer.status_code == 413
                assert str(MAX_BODY_BYTES) in error_of(path, answer.json())
            fits = b'{"model":"tiny"' + b" " * (MAX_BODY_BYTES - 16) + b"}"
            assert (await client.post(CHAT_PATH, content=fits)).status_code == 400

    run_async(main())


# Keys


def test_keys(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, keys="alpha=red, beta") as system, http(system) as client:
            for path in BODIES:
                for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "alph"}, {"authorization": "alpha"}):
                    answer = await client.post(path, json=BODIES[path], headers=headers)
                    assert answer.status_code == 401
                    assert "API key" in error_of(path, answer.json())
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            for headers in ({"authorization": "Bearer alpha"}, {"x-api-key": "beta"}):
                assert (await client.post(CHAT_PATH, json=BODIES[CHAT_PATH], headers=headers)).status_code == 200
            assert [submit.tenant for submit in system.entrypoint.submitted.values()] == ["red", "public"]
            async with sdks(system, "alpha") as (one, other):
                await one.chat.completions.create(model="tiny", messages=MESSAGES)
                await other.messages.create(model="tiny", max_tokens=5, messages=MESSAGES)
            async with sdks(system, "wrong") as (one, other):
                with pytest.raises(openai.AuthenticationError):
                    await one.chat.completions.create(model="tiny", messages=MESSAGES)
                with pytest.raises(anthropic.AuthenticationError):
                    await other.messages.create(model="tiny", max_tokens=5, messages=MESSAGES)

    run_async(main())


def test_key_lists() -> None:
    assert not Keys.parse("", Tenants()) and not Keys.parse(" , ", Tenants())
    assert Keys.parse("", Tenants()).tenant({}) == "public"
    assert Keys.parse("a=x,b", Tenants()).tenants == ((b"a", "x"), (b"b", "public"))
    assert Keys.parse("a=Jürgen", Tenants()).tenants == ((b"a", "Jürgen"),)
    for bad in ("=x", "a=", "a,=b", "schlüssel", "a,ключ=b"):
        with pytest.raises(KeysError):
            Keys.parse(bad, Tenants())


# Leaving


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_disconnects_cancels(run_async: Run, card: ModelCard, is_stream: bool) -> None:
    async def main() -> None:
        async with edge(card) as system:
            system.entrypoint.is_silent = True
            reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.port)
            raw = json.dumps({**BODIES[CHAT_PATH], "stream": is_stream}).encode()
            head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            await system.entrypoint.until(lambda: system.entrypoint.submitted)
            [id] = system.entrypoint.submitted
            if is_stream:
                await system.entrypoint.emit(id, [300, 301])
                assert b"200 OK" in await reader.readuntil(b"\r\n")
            writer.close()
            await system.entrypoint.until(lambda: id in system.entrypoint.cancelled)
            assert system.entrypoint.cancelled[id].reason is CancelReason.CLIENT_GONE
            assert len(system.recipe._open) == 0
            await asyncio.wait_for(_until(lambda: not system.gateway._exchanges), 5)

    run_async(main())


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_body_cut_short_disturbs_nobody(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            _, writer = await asyncio.open_connection("127.0.0.1", system.gateway.port)
            writer.write(f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
            await writer.drain()
            writer.close()
            assert (await client.post(CHAT_PATH, json=BODIES[CHAT_PATH])).status_code == 200
            assert len(system.entrypoint.submitted) == 1

    run_async(main())


def test_draining(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            await system.gateway.drain()
            assert (await client.get("/health")).status_code == 503
            for path, body in BODIES.items():
                answer = await client.post(path, json=body)
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "1"
                assert error_of(path, answer.json())

    run_async(main())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_who_finds_no_room_is_told_when_to_come_again(card: ModelCard, path: str, is_stream: bool) -> None:
    async def main() -> None:
        async with silent(card) as system, http(system) as client:
            posted = asyncio.create_task(client.post(path, json={**BODIES[path], "stream": is_stream}))
            (id,) = await submitted(system.entrypoint)
            full = Failure(code=Code.OVERLOADED, message="10 s too late", retry_after_s=7.2)
            await system.entrypoint.emit(id, [], Failed(failure=full))
            answer = await posted
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "8")
            assert answer.headers["x-should-retry"] == "true" and error_of(path, answer.json()) == "10 s too late"

    asyncio.run(main(), debug=True)


@pytest.mark.parametrize("path", BODIES)
def test_a_client_says_how_long_it_waits(run_async: Run, card: ModelCard, path: str) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            for is_stream in (False, True):
                body = {**BODIES[path], "stream": is_stream}
                late = await client.post(path, json=body, headers={"Shoal-Timeout-S": "0.000000001"})
                assert late.status_code == 504 and error_of(path, late.json())
                error = late.json()["error"]
                assert error.get("code", "deadline_exceeded") == "deadline_exceeded"
                assert error["type"] == ("timeout_error" if path == MESSAGES_PATH else "server_error")
                assert late.headers["x-should-retry"] == "false" and "retry-after" not in late.headers
                began_ns = system.gateway.bus.seams.clock_ns()
                answer = await client.post(path, json=body, headers={"shoal-timeout-s": "1000.5"})
                assert answer.status_code == 200
                deadline_ns = list(system.entrypoint.submitted.values())[-1].limits.deadline_ns
                assert 0 <= deadline_ns - began_ns - 1_000_500_000_000 <= system.gateway.bus.seams.clock_ns() - began_ns
            num_submitted = len(system.entrypoint.submitted)
            for bad in ("", "0", "0.0", "-1", "1e3", "nan", "inf", "5 s", "1_0", "9" * 30, "0x1"):
                refused = await client.post(path, json=BODIES[path], headers={"shoal-timeout-s": bad})
                assert refused.status_code == 400 and "shoal-timeout-s" in error_of(path, refused.json()), bad
            assert len(system.entrypoint.submitted) == num_submitted and system.gateway.load().num_running == 0

    run_async(main())


def test_stopping_ends_streams_and_frees_the_port(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            system.entrypoint.is_silent = True
            async with client.stream("POST", CHAT_PATH, json={**BODIES[CHAT_PATH], "stream": True}) as answer:
                asking = asyncio.create_task(answer.aread())
                system.tasks["g"].cancel()
                await asyncio.wait([system.tasks["g"]], timeout=5)
                assert system.tasks["g"].done()
                await asking
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", system.gateway.port)

    async def begun() -> None:
        async with edge(card) as system, http(system) as client:
            system.entrypoint.is_silent = True
            asking = asyncio.create_task(client.post(CHAT_PATH, json={**BODIES[CHAT_PATH], "stream": True}))
            await system.entrypoint.until(lambda: system.entrypoint.submitted)
            [id] = system.entrypoint.submitted
            await system.entrypoint.emit(id, [300])
            await _until(lambda: next(iter(system.gateway._exchanges.values())).stream.next_seq)
            system.tasks["g"].cancel()
            await asyncio.wait([system.tasks["g"]], timeout=5)
            answer = await asking
            assert '"code":"shutting_down"' in answer.text
            await system.entrypoint.until(lambda: id in system.entrypoint.cancelled)
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", system.gateway.port)

    run_async(begun())


def test_a_call_whose_answer_is_lost_is_cancelled(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_actor, "CALL_TIMEOUT_S", 0.3)

    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            system.entrypoint.is_silent = True
            publish = system.broker.publish

            def lossy(source: MemoryWire, delivery: Delivery) -> None:
                if b"Called" not in delivery.body:
                    publish(source, delivery)

            monkeypatch.setattr(system.broker, "publish", lossy)
            answer = await client.post(CHAT_PATH, json=BODIES[CHAT_PATH])
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
            [id] = system.entrypoint.submitted
            await system.entrypoint.until(lambda: id in system.entrypoint.cancelled)
            assert len(system.recipe._open) == 0

    run_async(main())


def test_a_recipe_that_died(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            system.entrypoint.is_silent = True
            asking = asyncio.create_task(client.post(CHAT_PATH, json={**BODIES[CHAT_PATH], "stream": True}))
            await _until(lambda: any(exchange.recipe for exchange in system.gateway._exchanges.values()))
            await system.kill("r")
            await system.entrypoint.bus.tell(EXITED.all(), ProcessExited(name="x", pid=1, members=["recipe/rc0"]))
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
            answer = await client.post(CHAT_PATH, json=BODIES[CHAT_PATH])
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_responders")

    run_async(main())


def test_silence_is_broken_and_asked_after(run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep-alives while the recipe knows the stream; an error when it does not."""
    monkeypatch.setattr(gateway_actor, "WATCH_S", 0.05)
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)

    async def main() -> None:
        async with edge(card, text="Hello") as system, http(system) as client:
            system.entrypoint.is_silent = True
            for path, mark in ((CHAT_PATH, ": keep-alive"), (MESSAGES_PATH, "event: ping")):
                async with client.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
                    lines = answer.aiter_lines()
                    assert await anext(lines) == mark
                    id = list(system.entrypoint.submitted)[-1]
                    await system.entrypoint.emit(id, system.entrypoint.answer, Finished(reason=FinishReason.STOP))
                    rest = [line async for line in lines]
                    assert any('"Hello"' in line for line in rest)
            async with client.stream("POST", CHAT_PATH, json={**BODIES[CHAT_PATH], "stream": True}) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                for request in system.recipe._open:
                    system.recipe._open.remove(request)
                    request.door.close()
                assert any('"code":"worker_lost"' in line for line in [line async for line in lines])

    run_async(main())
