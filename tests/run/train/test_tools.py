"""A call is of a tool that is offered, with arguments of its schema that the request says; results are told."""

from __future__ import annotations

import json
from typing import Any

from run.train.seeds import rng
from run.train.tasks.tools import POOL, example

TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool}


def test_calls_answer_the_request_with_a_tool_that_is_offered() -> None:
    called = set()
    for index in range(300):
        made = example(rng("train", "tools", index), 0)
        for message in (*made.request["messages"], made.answer):
            for call in message.get("tool_calls", ()):
                name = call["function"]["name"]
                schema = next(
                    tool["function"]["parameters"] for tool in made.request["tools"] if tool["function"]["name"] == name
                )
                asked = next(message["content"] for message in made.request["messages"] if message["role"] == "user")
                _check(json.loads(call["function"]["arguments"]), schema, asked)
                called.add(name)
    assert called == {tool.name for tool in POOL}


def _check(arguments: dict[str, Any], schema: dict[str, Any], asked: str) -> None:
    assert list(arguments) == schema["required"]
    for key, value in arguments.items():
        kind = schema["properties"][key]
        assert type(value) is TYPES[kind["type"]] and value in kind.get("enum", [value])
        if value is not True and value is not False:
            assert str(value) in asked


def test_what_a_tool_answered_is_told() -> None:
    told = 0
    for index in range(200):
        made = example(rng("train", "tools", index), 0)
        last = made.request["messages"][-1]
        if last["role"] == "tool":
            values = [str(value) for value in json.loads(last["content"]).values() if value is not True]
            assert all(value in made.answer["content"] for value in values)
            told += bool(values)
    assert told > 10


def test_talk_needs_no_tool_and_thinking_names_one() -> None:
    made = [example(rng("train", "tools", index), 0) for index in range(200)]
    thoughts = {one.answer["reasoning_content"] for one in made if one.request["thinking"]["type"] == "enabled"}
    assert "No tool is needed." in thoughts and len(thoughts) > 3
    for one in made:
        assert ("reasoning_content" in one.answer) == (one.request["thinking"]["type"] == "enabled")
    assert sum("tool_calls" in one.answer for one in made) in range(75, 125)
