"""Which answers count as right."""

from __future__ import annotations

from typing import Any

import pytest

from run.train.example import Example
from run.train.judge import is_correct, parse_json


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def judge(answer: dict[str, Any], message: dict[str, Any], skill: str = "recall") -> bool:
    return is_correct(Example(skill, {}, answer), message)


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("The code of Ida is 7.", True),
        (" The code of Ida is 7.\n", True),
        ("The code of Ida is 8.", False),
        (None, False),
    ],
)
def test_content(content: str | None, right: bool) -> None:
    message = {"content": content, "reasoning_content": "whatever"}
    assert judge({"content": "The code of Ida is 7."}, message) is right


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([call("buy", '{"thing": "piano", "number": 84}')], True),
        ([call("buy", '{"number":84,"thing":"piano"}')], True),
        ([call("buy", '{"thing": "piano", "number": "84"}')], False),
        ([call("buy", '{"thing": "piano", "number": 84')], False),
        ([call("sell", '{"thing": "piano", "number": 84}')], False),
        ([call("buy", '{"thing": "piano", "number": 84}')] * 2, False),
        ([], False),
    ],
)
def test_tool_calls(calls: list[dict[str, Any]], right: bool) -> None:
    answer = {"content": "", "tool_calls": [call("buy", '{"thing":"piano","number":84}')]}
    assert judge(answer, {"content": "", "tool_calls": calls}, "tools") is right
    assert not judge(answer, {"content": "I buy it.", "tool_calls": calls}, "tools")
    assert not judge({"content": ""}, {"content": "", "tool_calls": [call("buy", "{}")]}, "tools")


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ('{"age": 1, "names": ["Ida", "Ben"]}', True),
        ('{"names":["Ida","Ben"],"age":1}\n', True),
        ('{"age": true, "names": ["Ida", "Ben"]}', False),
        ('{"age": 1, "names": ["Ben", "Ida"]}', False),
        ('{"age": 1, "names": ["Ida", "Ben"]', False),
    ],
)
def test_json(content: str, right: bool) -> None:
    answer = {"content": '{"age": 1, "names": ["Ida", "Ben"]}'}
    assert judge(answer, {"content": content}, "json") is right


def test_what_is_no_json() -> None:
    assert [parse_json(text) for text in ("NaN", "", "{'a': 1}", "[1,]")] == [None] * 4
    assert parse_json("null") == "null"
