"""Structured output through the SDKs, from a model that has learned nothing: what is right is right by force."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from jsonschema import Draft202012Validator

pytestmark = pytest.mark.stack

MODEL = "shoal-tiny"
NUM_TOKENS = 400
ASK: list[Any] = [{"role": "user", "content": "Answer in json."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "c": {"type": "string", "enum": ["r", "g"]},
        "n": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2},
        "id": {"type": "string", "pattern": "^[A-Z]-[0-9]$"},
    },
    "required": ["c", "n", "id"],
    "additionalProperties": False,
}


def test_a_schema_in_each_protocol(ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
    """At once, so that they share steps with each other."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    text: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    sent: Any = {"model": MODEL, "messages": ASK, "max_tokens": NUM_TOKENS}

    def chat() -> str:
        choice = ai.chat.completions.create(**sent, temperature=1, seed=1, response_format=form).choices[0]
        assert choice.finish_reason == "stop"
        return choice.message.content or ""

    def stream() -> str:
        chunks = ai.chat.completions.create(**sent, temperature=0, stream=True, response_format=form)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def responses() -> str:
        return ai.responses.create(model=MODEL, input="json", max_output_tokens=NUM_TOKENS, text=text).output_text

    def messages() -> str:
        message = sdk.messages.create(**sent, output_config=config)
        assert message.stop_reason == "end_turn"
        return "".join(block.text for block in message.content if block.type == "text")

    with ThreadPoolExecutor() as threads:
        for answer in threads.map(lambda ask: ask(), (chat, stream, responses, messages)):
            Draft202012Validator(SCHEMA).validate(json.loads(answer))


def test_patterns_and_objects(ai: openai.OpenAI) -> None:
    form: Any = {"type": "regex", "regex": "^(yes|no), [0-9]$"}
    answer = ai.chat.completions.create(model=MODEL, messages=ASK, max_tokens=40, response_format=form)
    assert (answer.choices[0].message.content or "").partition(", ")[0] in ("yes", "no")
    answer = ai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=12, temperature=1, seed=1, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "at": {"type": "object", "properties": {"z": {"enum": ["1", 2]}}, "required": ["z"]},
    },
    "required": ["unit", "at"],
}
TOOL["properties"]["at"]["additionalProperties"] = False


def test_a_tool_that_has_to_be_called(ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in ("w", "other")]
    client_tools: Any = [{"name": "w", "input_schema": TOOL, "strict": True}]
    sent: Any = {"model": MODEL, "messages": ASK, "max_tokens": NUM_TOKENS}

    def named() -> tuple[str, Any]:
        choice: Any = {"type": "function", "function": {"name": "w"}}
        chat = ai.chat.completions.create(**sent, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        (call,) = chat.choices[0].message.tool_calls or []
        assert chat.choices[0].finish_reason == "tool_calls"
        return call.function.name, json.loads(call.function.arguments)

    def any_one() -> tuple[str, Any]:
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        message = sdk.messages.create(**sent, tools=client_tools, tool_choice=choice)
        (use,) = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use"
        return use.name, use.input

    with ThreadPoolExecutor() as threads:
        for name, arguments in threads.map(lambda ask: ask(), (named, any_one)):
            assert name == "w"
            Draft202012Validator(TOOL).validate(arguments)


def test_a_tool_that_may_be_called(ai: openai.OpenAI) -> None:
    """Whatever it says, it calls nothing in a way that its schema does not allow."""
    tools: Any = [{"type": "function", "function": {"name": "w", "parameters": TOOL}}]
    chat = ai.chat.completions.create(model=MODEL, messages=ASK, max_tokens=40, temperature=1, seed=2, tools=tools)
    message = chat.choices[0].message
    assert message.content or message.tool_calls
    assert "DSML" not in (message.content or "")


def test_what_cannot_be_had_is_an_error_that_names_it(ai: openai.OpenAI, sdk: anthropic.Anthropic) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        ai.chat.completions.create(model=MODEL, messages=ASK, response_format=form)
    assert refused.value.param == "response_format"
    strict: Any = [{"name": "f", "input_schema": {"type": "object", "oneOf": [{}]}, "strict": True}]
    with pytest.raises(anthropic.BadRequestError, match="oneOf"):
        sdk.messages.create(model=MODEL, messages=ASK, max_tokens=9, tools=strict)
    loose = ai.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=ASK,
        max_tokens=4,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "oneOf": [{}]}}}],
    )
    assert loose.headers["x-shoal-ignored"] == "tools[].function.parameters"
