"""Images through the whole system: the official SDKs and a NATS client, and the model's own eyes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import anthropic
import openai
import pytest

from schemas.api import Protocol
from tests.actors.pictures import at, block, body_of, picture
from tests.stack.conftest import System, until
from tests.stack.test_chaos import until_free

pytestmark = pytest.mark.stack

MODEL = "shoal-tiny"
CHAT, RESPONSES, MESSAGES = Protocol.CHAT_COMPLETIONS, Protocol.RESPONSES, Protocol.MESSAGES
RED, BLUE = picture("red"), picture("blue", 90, 60)
NUM_TOKENS = 12


def body(protocol: Protocol, *blocks: Any, **fields: Any) -> dict[str, Any]:
    longest = "max_output_tokens" if protocol is RESPONSES else "max_tokens"
    return {**body_of(protocol, *blocks, **fields), "model": MODEL, longest: NUM_TOKENS}


def chat(ai: openai.OpenAI, *blocks: Any) -> str:
    answer = ai.chat.completions.create(**body(CHAT, *blocks, temperature=0))
    return answer.choices[0].message.content or ""


def test_what_is_seen_and_in_which_order_makes_the_answer(ai: openai.OpenAI) -> None:
    seen = [(), (RED,), (BLUE,), (RED, BLUE), (BLUE, RED)]
    answers = [chat(ai, "What is this?", *blocks) for blocks in seen]
    answers.append(chat(ai, RED, "What is this?"))
    assert len(set(answers)) == len(answers)
    assert [chat(ai, "What is this?", *blocks) for blocks in seen] == answers[:-1]


def test_chat_and_responses_stream_what_they_give_whole(ai: openai.OpenAI) -> None:
    blocks = ("What is this?", RED)
    whole = chat(ai, *blocks)
    stream = ai.chat.completions.create(**body(CHAT, *blocks, temperature=0), stream=True)
    assert whole and "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    answer = ai.responses.create(**body(RESPONSES, *blocks, temperature=0))
    assert answer.output_text == whole
    events = ai.responses.create(**body(RESPONSES, *blocks, temperature=0), stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole


def test_messages_stream_and_count(ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
    blocks = ("What is this?", RED, BLUE)
    wanted = body(MESSAGES, *blocks, extra_body={"temperature": 0})
    whole = sdk.messages.create(**wanted)
    assert "".join(part.text for part in whole.content if part.type == "text") == chat(ai, *blocks)
    with sdk.messages.stream(**wanted) as stream:
        assert stream.get_final_message().content[0].text == whole.content[0].text  # type: ignore[union-attr]
    counted = sdk.messages.count_tokens(model=MODEL, messages=wanted["messages"])
    assert counted.input_tokens == whole.usage.input_tokens
    assert sdk.models.retrieve(MODEL).capabilities.image_input.supported  # type: ignore[union-attr]


def test_an_image_in_a_tool_result(sdk: anthropic.Anthropic) -> None:
    def ask(data: bytes) -> Any:
        call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [block(MESSAGES, data)]}
        turns = [("user", "Look."), ("assistant", [call]), ("user", [result])]
        messages: Any = [{"role": role, "content": content} for role, content in turns]
        tool: Any = {"name": "look", "input_schema": {"type": "object"}}
        answer = sdk.messages.create(
            model=MODEL, messages=messages, tools=[tool], max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
        )
        return [part.model_dump() for part in answer.content]

    assert ask(RED) == ask(RED) != ask(BLUE)


@pytest.mark.parametrize("data", [b"", b"hello", picture("red", 300, 200)[:-50], picture("red", 20_000, 1)])
def test_bad_images_are_a_400_of_the_protocol(ai: openai.OpenAI, sdk: anthropic.Anthropic, data: bytes) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(**body(CHAT, "x", data))
    assert caught.value.param == "messages[0].content[1].image_url"
    with pytest.raises(openai.BadRequestError) as caught:
        ai.responses.create(**body(RESPONSES, "x", data))
    assert caught.value.param == "input[0].content[1].image_url"
    with pytest.raises(anthropic.BadRequestError, match="image"):
        sdk.messages.create(**body(MESSAGES, "x", data))


def test_exact_is_honoured_and_a_boolean(ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
    exact = {"exact": True}
    answers = [ai.chat.completions.create(**body(CHAT, RED, "x", temperature=0), extra_body=exact) for _ in range(2)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert ai.responses.create(**body(RESPONSES, "x"), extra_body=exact).output_text
    assert sdk.messages.create(**body(MESSAGES, "x"), extra_body=exact).content
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(**body(CHAT, "x"), extra_body={"exact": "yes"})
    assert caught.value.param == "exact"


def test_a_nats_client_sees_the_same(stack: System, ai: openai.OpenAI) -> None:
    async def main() -> dict[str, Any]:
        async with stack.client() as client:
            wanted = json.dumps(body(CHAT, RED, "What?", temperature=0)).encode()
            answer: dict[str, Any] = json.loads((await client.request("shoal.api.chat_completions", wanted, 30)).data)
            return answer

    answer = asyncio.run(main())
    assert answer["choices"][0]["message"]["content"] == chat(ai, RED, "What?")


def test_vision_killed_at_its_work(stack: System) -> None:
    """The process that sees ends: every request ends too, well or with a typed error, and sight comes back."""

    async def main() -> None:
        victim = stack.pid("vision")
        large = picture("red", 1500, 1000)
        async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0, timeout=60) as ai:

            async def ask(*blocks: Any) -> str:
                try:
                    await ai.chat.completions.create(**body(CHAT, *blocks))
                except openai.APIStatusError as error:
                    return str(error.code)
                return ""

            running = [asyncio.create_task(ask(large, f"Number {i}.")) for i in range(12)]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            os.kill(victim, signal.SIGKILL)
            ends = await asyncio.gather(*running)
            assert set(ends) <= {"", "vision_error", "worker_lost", "no_replica", "deadline_exceeded"}
            await until(lambda: stack.pid("vision") != victim)
            await until_free(stack)
            assert await ask(RED, "x") == ""

    asyncio.run(main())


def test_a_url_inside_is_refused_by_name(stack: System, ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
    """The gateway's own port answers, but not to the recipe."""
    url = f"{stack.http}/healthz"
    with pytest.raises(openai.BadRequestError, match="not public") as caught:
        ai.chat.completions.create(**body(CHAT, "x", at(CHAT, url)))
    assert caught.value.param == "messages[0].content[1].image_url"
    with pytest.raises(openai.BadRequestError, match="not public"):
        ai.responses.create(**body(RESPONSES, "x", at(RESPONSES, url)))
    with pytest.raises(anthropic.BadRequestError, match=r"content\[1\]\.source.* not public"):
        sdk.messages.create(**body(MESSAGES, "x", at(MESSAGES, url)))
