"""Inside messages, items and blocks nothing is dropped unseen, and our own answers are good history."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
import pytest

from actors.recipe.converter import Converter
from actors.recipe.fields import Refusal
from actors.recipe.session import Session
from schemas.api import Protocol
from schemas.failure import Code
from schemas.request import FinishReason
from tests.actors.bodies import CHAT, ID, MESSAGES, RESPONSES, prepared
from tests.actors.test_fields import chat, messages, responses

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
OUTPUT = """deep</think>Hello

<｜DSML｜ calls>
<｜DSML｜ invoke name="f">

</｜DSML｜ invoke>
</｜DSML｜ calls>"""
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    "kind", ["item_reference", "zorg", "computer_call_output", "web_search_call", "additional_tools", "compaction", 7]
)
def test_items_that_would_be_dropped_are_refused(kind: Any) -> None:
    with pytest.raises(Refusal) as refused:
        responses(input=[HI, {"type": kind, "id": "x"}])
    assert (refused.value.failure.code, refused.value.failure.field) == (Code.UNSUPPORTED, "input[1].type")


def test_what_is_ignored_of_reasoning_items_is_listed() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"}
    assert responses(input=[HI, item]).ignored == ["input[].encrypted_content", "input[].summary"]
    assert responses(input=[HI, {"type": "reasoning", "summary": [], "encrypted_content": None}]).ignored == []


@pytest.mark.parametrize(
    ("make", "fields", "code", "field"),
    [
        (chat, {"messages": [{**HI, "zorg": 1}]}, Code.BAD_REQUEST, "messages[0].zorg"),
        (chat, {"messages": [HI, {**HI, "function_call": {}}]}, Code.UNSUPPORTED, "messages[1].function_call"),
        (chat, {"messages": [{**HI, "audio": {"id": "a"}}]}, Code.UNSUPPORTED, "messages[0].audio"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "zorg": 1}]}]},
            Code.BAD_REQUEST,
            "messages[0].content[0].zorg",
        ),
        (
            responses,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "zorg": 1}]}]},
            Code.BAD_REQUEST,
            "input[0].content[0].zorg",
        ),
        (
            responses,
            {"input": [{"type": "function_call_output", "output": [{"type": "input_text", "zorg": 1}]}]},
            Code.BAD_REQUEST,
            "input[0].output[0].zorg",
        ),
        (responses, {"input": [{**HI, "zorg": 1}]}, Code.BAD_REQUEST, "input[0].zorg"),
        (
            responses,
            {"input": [HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "zorg": 1}]},
            Code.BAD_REQUEST,
            "input[1].zorg",
        ),
        (
            chat,
            {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "zorg": 1}]}]},
            Code.BAD_REQUEST,
            "messages[1].tool_calls[0].zorg",
        ),
        (
            chat,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "zorg": 1}}]}]},
            Code.BAD_REQUEST,
            "messages[0].tool_calls[0].function.zorg",
        ),
        (messages, {"messages": [{**HI, "zorg": 1}]}, Code.BAD_REQUEST, "messages[0].zorg"),
        (messages, {"system": [{"type": "text", "text": "x", "zorg": 1}]}, Code.BAD_REQUEST, "system[0].zorg"),
        (
            messages,
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"zorg": 1}]}]}]},
            Code.BAD_REQUEST,
            "messages[0].content[0].content[0].zorg",
        ),
    ],
)
def test_unknown_and_refused_fields_are_named_by_their_place(make: Any, fields: Any, code: Code, field: str) -> None:
    with pytest.raises(Refusal) as refused:
        make(**fields)
    assert (refused.value.failure.code, refused.value.failure.field) == (code, field)
    assert field in refused.value.failure.message


def test_harmless_fields_are_listed_when_they_say_something() -> None:
    turn = {"role": "assistant", "content": "x", "refusal": "no", "annotations": [{}], "audio": None}
    assert chat(messages=[HI, turn]).ignored == ["messages[].annotations", "messages[].refusal"]
    assert chat(messages=[HI, {**turn, "refusal": None, "annotations": []}]).ignored == []
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "citations": None}
    assert messages(system=[block]).ignored == ["content[].cache_control"]


def answer(converter: Converter, protocol: Protocol, body: dict[str, Any]) -> dict[str, Any]:
    """What a request with this body is answered when the model thinks, speaks and calls."""
    done = prepared(converter, protocol, json.dumps(body).encode())
    session = Session(converter, done, ID, 1)
    session.push(converter.tokenizer.encode(OUTPUT))
    answered: dict[str, Any] = json.loads(session.finish(FinishReason.STOP, 2)[-1])
    return answered


def replay(converter: Converter, protocol: Protocol, body: dict[str, Any]) -> tuple[str, list[str]]:
    done = prepared(converter, protocol, json.dumps(body).encode())
    return converter._encoding.render_conversation(done.request.conversation).prompt, done.ignored


def test_a_chat_answer_is_good_history(converter: Converter) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {"model": "tiny", "tools": tools, "thinking": {"type": "enabled"}, "messages": [HI]}
    raw = answer(converter, CHAT, body)
    of_sdk = openai.types.chat.ChatCompletion.construct(**raw).choices[0].message
    for turn in (raw["choices"][0]["message"], of_sdk.model_dump(), of_sdk.model_dump(exclude_unset=True)):
        result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "done"}
        prompt, ignored = replay(converter, CHAT, {**body, "messages": [HI, turn, result]})
        assert "deep" in prompt and "Hello" in prompt and "done" in prompt and ignored == []


def test_a_responses_answer_is_good_history(converter: Converter) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    body = {"model": "tiny", "tools": tools, "reasoning": {"effort": "high"}, "input": [HI]}
    raw = answer(converter, RESPONSES, body)
    of_sdk = openai.types.responses.Response.construct(**raw)
    for output in (raw["output"], [item.model_dump() for item in of_sdk.output]):
        result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "done"}
        prompt, ignored = replay(converter, RESPONSES, {**body, "input": [HI, *output, result]})
        assert "deep" in prompt and "Hello" in prompt and "done" in prompt
        assert ignored == ["input[].encrypted_content"]


def test_a_messages_answer_is_good_history(converter: Converter) -> None:
    tools = [{"name": "f", "input_schema": SCHEMA}]
    body = {"model": "tiny", "tools": tools, "thinking": {"type": "enabled"}, "max_tokens": 50, "messages": [HI]}
    raw = answer(converter, MESSAGES, body)
    of_sdk = anthropic.types.Message.construct(**raw)
    for blocks in (raw["content"], [block.model_dump() for block in of_sdk.content]):
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "done", "is_error": True}
        turns = [HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        prompt, ignored = replay(converter, MESSAGES, {**body, "messages": turns})
        assert "deep" in prompt and "Hello" in prompt and "done" in prompt
        assert ignored == ["content[].is_error"]
