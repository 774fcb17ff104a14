"""The gateway on a real socket, spoken to by the SDKs and by clients that misbehave."""

from __future__ import annotations

import asyncio
import json

import anthropic
import openai
import pytest

from actors.gateway.actor import Gateway
from actors.gateway.http import frame
from actors.recipe.card import ModelCard
from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.request import Failed, Finished, FinishReason
from tests.actors.clients import BODIES, CHAT_PATH, MESSAGES, MESSAGES_PATH, RESPONSES_PATH, TEXT, error_of, http, sdks
from tests.actors.edge import STOP, Edge, edge, silent, submitted
from tests.bus.conformance import ActorConformance
from tests.conftest import Run


class TestGatewayConformance(ActorConformance):
    """The contract of every actor."""

    def make(self, bus: Bus) -> Actor:
        return Gateway("g0", bus, MemoryBulk(MemoryHub()), port=0)


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
                await client.messages.create(model="another", max_tokens=5, messages=MESSAGES)

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


def test_load_counts_the_requests_being_served(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system, http(system) as client:
            assert system.gateway.load().num_running == 0
            asking = [asyncio.create_task(client.post(path, json=body)) for path, body in BODIES.items()]
            ids = await submitted(system.entrypoint, len(asking))
            assert system.gateway.load().num_running == len(asking)
            for id in ids:
                await system.entrypoint.emit(id, system.entrypoint.answer, STOP)
            await asyncio.wait(asking)
            assert system.gateway.load().num_running == 0

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
