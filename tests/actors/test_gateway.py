"""The gateway on a real socket, spoken to by the SDKs and by clients that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from actors.gateway import actor as gateway_actor
from actors.gateway.actor import MAX_BODY_BYTES, Gateway
from actors.gateway.http import frame
from actors.gateway.keys import Keys, KeysError
from actors.recipe.card import ModelCard
from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus
from bus.subjects import EXITED
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.request import CancelReason, Failed, Finished, FinishReason
from tests.actors.edge import Edge, edge, make_card
from tests.bus.conformance import ActorConformance
from tests.conftest import Run

TEXT = "Hello there, 你好!"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"model": "tiny", "messages": MESSAGES},
    RESPONSES_PATH: {"model": "tiny", "input": "Hi"},
    MESSAGES_PATH: {"model": "tiny", "messages": MESSAGES, "max_tokens": 50},
}


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return make_card(tmp_path_factory.mktemp("model"))


class TestGatewayConformance(ActorConformance):
    """The contract of every actor."""

    def make(self, bus: Bus) -> Actor:
        return Gateway("g0", bus, MemoryBulk(MemoryHub()), port=0)


@asynccontextmanager
async def http(system: Edge) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=system.url, timeout=20) as client:
        yield client


@asynccontextmanager
async def sdks(system: Edge, key: str = "none") -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    async with (
        openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key=key, max_retries=0) as one,
        anthropic.AsyncAnthropic(base_url=system.url, api_key=key, max_retries=0) as other,
    ):
        yield one, other


def error_of(path: str, body: dict[str, Any]) -> str:
    """The message of an error body, if it has the shape the path's protocol wants."""
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and body["request_id"]
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


# The SDKs


def test_openai_chat(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, text=TEXT) as system, sdks(system) as (client, _):
            answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
            assert answer.choices[0].message.content == TEXT
            assert answer.usage and answer.usage.completion_tokens == len(system.entrypoint.answer)
            stream = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
            assert chunks[-1].usage and chunks[-1].usage.total_tokens > 0
            assert [model.id async for model in client.models.list()] == ["shoal-tiny", "tiny"]
            assert (await client.models.retrieve("tiny")).id == "tiny"
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt-4")

    run_async(main())


def test_openai_responses(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, text=TEXT) as system, sdks(system) as (client, _):
            answer = await client.responses.create(model="tiny", input="Hi")
            assert answer.output_text == TEXT
            async with client.responses.stream(model="tiny", input="Hi") as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
            assert final.output_text == TEXT

    run_async(main())


def test_anthropic_messages(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, text=TEXT) as system, sdks(system) as (_, client):
            answer = await client.messages.create(model="tiny", max_tokens=50, messages=MESSAGES)
            assert [block.text for block in answer.content if block.type == "text"] == [TEXT]
            async with client.messages.stream(model="tiny", max_tokens=50, messages=MESSAGES) as stream:
                assert "".join([text async for text in stream.text_stream]) == TEXT
                final = await stream.get_final_message()
            assert final.stop_reason == "end_turn"
            assert final.usage.output_tokens == len(system.entrypoint.answer)
            count = await client.messages.count_tokens(model="tiny", messages=MESSAGES)
            assert count.input_tokens == final.usage.input_tokens
            assert [model.id async for model in client.models.list()] == ["shoal-tiny", "tiny"]
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await client.messages.create(model="claude", max_tokens=5, messages=MESSAGES)

    run_async(main())


def test_errors_in_the_middle_reach_the_sdks(run_async: Run, card: ModelCard) -> None:
    failed = Failed(failure=Failure(code=Code.WORKER_LOST, message="decode replica d0 was lost"))

    async def fail_after(system: Edge, num: int) -> None:
        await system.entrypoint.until(lambda: len(system.entrypoint.submitted) == num)
        id = list(system.entrypoint.submitted)[-1]
        await system.entrypoint.emit(id, system.entrypoint.answer[:2])
        await system.entrypoint.emit(id, [], failed)

    async def main() -> None:
        async with edge(card, text=TEXT) as system, sdks(system) as (one, other):
            system.entrypoint.is_silent = True
            failing = asyncio.create_task(fail_after(system, 1))
            with pytest.raises(openai.APIError, match="d0 was lost"):
                async for _ in await one.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                    pass
            await failing
            failing = asyncio.create_task(fail_after(system, 2))
            with pytest.raises(openai.APIError, match="d0 was lost"):
                async for _ in await one.responses.create(model="tiny", input="Hi", stream=True):
                    pass
            await failing
            failing = asyncio.create_task(fail_after(system, 3))
            with pytest.raises(anthropic.APIStatusError, match="d0 was lost"):
                async for _ in await other.messages.create(model="tiny", max_tokens=9, messages=MESSAGES, stream=True):
                    pass
            await failing

    run_async(main())


@pytest.mark.parametrize("is_stream", [True, False])
def test_errors_before_the_first_event_have_a_status(run_async: Run, card: ModelCard, is_stream: bool) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            system.entrypoint.is_silent = True
            for num, (path, body) in enumerate(BODIES.items(), 1):
                asking = asyncio.create_task(client.post(path, json={**body, "stream": is_stream}))
                await system.entrypoint.until(lambda num=num: len(system.entrypoint.submitted) == num)
                failure = Failure(code=Code.NO_REPLICA, message="no decode replica")
                await system.entrypoint.emit(list(system.entrypoint.submitted)[-1], [], Failed(failure=failure))
                answer = await asking
                assert answer.status_code == 503
                assert answer.headers["x-should-retry"] == "true"
                assert error_of(path, answer.json()) == "no decode replica"

    run_async(main())


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


def test_paths_and_methods(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (200, {"status": "ok"})
            for method, path, http_status in (
                ("GET", "/", 404),
                ("POST", "/v1/completions", 404),
                ("GET", CHAT_PATH, 405),
                ("POST", "/v1/models", 405),
                ("GET", "/v1/messages/batches", 404),
                ("GET", "/v1/models/gpt", 404),
                ("GET", "/v1/models/tiny", 200),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == http_status, path
                if http_status != 200:
                    assert error_of(path, answer.json())
                if http_status == 405:
                    assert answer.headers["allow"] == ("POST" if path == CHAT_PATH else "GET")
            anthropic_list = await client.get("/v1/models/gpt", headers={"anthropic-version": "2023-06-01"})
            assert anthropic_list.json()["type"] == "error"

    run_async(main())


def test_ids_and_ignored_fields(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            body = {**BODIES[CHAT_PATH], "user": "u", "metadata": {"a": "b"}}
            answer = await client.post(CHAT_PATH, json=body, headers={"X-Request-Id": "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
            assert answer.headers["x-shoal-ignored"] == "metadata, user"
            answer = await client.post(MESSAGES_PATH, json={**BODIES[MESSAGES_PATH], "stream": True})
            assert len(answer.headers["x-request-id"]) == 32
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
            insane = await client.post(CHAT_PATH, json=body, headers={"x-request-id": "a b" * 99})
            assert len(insane.headers["x-request-id"]) == 32

    run_async(main())


def test_frames(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, text="Hi") as system, http(system) as client:
            text = (await client.post(CHAT_PATH, json={**BODIES[CHAT_PATH], "stream": True})).text
            assert text.startswith("data: {") and text.endswith("\n\ndata: [DONE]\n\n")
            for path in (RESPONSES_PATH, MESSAGES_PATH):
                answer = await client.post(path, json={**BODIES[path], "stream": True})
                assert answer.headers["content-type"].startswith("text/event-stream")
                for block in answer.text.removesuffix("\n\n").split("\n\n"):
                    event, data = block.split("\n")
                    assert json.loads(data.removeprefix("data: "))["type"] == event.removeprefix("event: ")

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
    assert not Keys.parse("") and not Keys.parse(" , ")
    assert Keys.parse("").tenant({}) == "public"
    assert Keys.parse("a=x,b").tenants == ((b"a", "x"), (b"b", "public"))
    for bad in ("=x", "a=", "a,=b"):
        with pytest.raises(KeysError):
            Keys.parse(bad)


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
    monkeypatch.setattr(gateway_actor, "KEEP_ALIVE_S", 0.05)

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
                assert any('"code":"worker_lost"' in line for line in [line async for line in lines])

    run_async(main())


def test_many_streams_at_once_stay_apart(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, sdks(system) as (client, _):
            system.entrypoint.is_silent = True

            async def ask() -> str:
                stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            asking = [asyncio.create_task(ask()) for _ in range(16)]
            await system.entrypoint.until(lambda: len(system.entrypoint.submitted) == 16)
            tokenizer = system.recipe._converter.tokenizer
            texts = {id: f"stream number {i}" for i, id in enumerate(system.entrypoint.submitted)}
            outputs = {id: tokenizer.encode(text) for id, text in texts.items()}
            for i in range(max(map(len, outputs.values()))):
                for id, tokens in outputs.items():
                    await system.entrypoint.emit(id, tokens[i : i + 1])
            for id in outputs:
                await system.entrypoint.emit(id, [], Finished(reason=FinishReason.STOP))
            assert sorted(await asyncio.gather(*asking)) == sorted(texts.values())

    run_async(main())


def test_a_large_body_travels_beside_the_bus(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system, http(system) as client:
            system.entrypoint.is_silent = True
            asking = asyncio.create_task(client.post(CHAT_PATH, json=BODIES[CHAT_PATH]))
            await system.entrypoint.until(lambda: system.entrypoint.submitted)
            [id] = system.entrypoint.submitted
            tokens = system.recipe._converter.tokenizer.encode(" there" * 60_000)
            for start in range(0, len(tokens), 20_000):
                await system.entrypoint.emit(id, tokens[start : start + 20_000])
            await system.entrypoint.emit(id, [], Finished(reason=FinishReason.STOP))
            answer = await asking
            assert answer.json()["choices"][0]["message"]["content"] == " there" * 60_000

    run_async(main())


def test_frame_names() -> None:
    item = b'{"type":"message_stop"}'
    assert frame(Protocol.MESSAGES, [item]) == b"event: message_stop\ndata: " + item + b"\n\n"
    assert frame(Protocol.CHAT_COMPLETIONS, [b"{}", b"{}"]) == b"data: {}\n\ndata: {}\n\n"
