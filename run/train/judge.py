"""Whether an answer is the right one: what `shoal eval` counts, by the example's own answer."""

from __future__ import annotations

import json
from typing import Any

from run.train.example import Example

JSON_SKILL = "json"
"""Of examples whose content is judged by what it says as JSON, not letter by letter."""


def is_correct(example: Example, message: dict[str, Any]) -> bool:
    """Whether `message`, an assistant's in OpenAI's form, says what `example` wants.

    Same content but for white space around it, or of JSON the same value; the same tool calls in the same order: names,
    and arguments as values. How it was reasoned does not count.
    """
    wanted, given = _content(example.answer), _content(message)
    if example.skill == JSON_SKILL:
        is_same = parse_json(given) is not None and parse_json(given) == parse_json(wanted)
    else:
        is_same = given == wanted
    return is_same and _calls(message) == _calls(example.answer)


def parse_json(text: str) -> str | None:
    """The value of a JSON text in one spelling, so that equal values are equal texts (1 is not true, and not 1.0); None
    when it is no JSON. Order of keys does not count."""
    try:
        return json.dumps(json.loads(text, parse_constant=_refuse), sort_keys=True)
    except ValueError:
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _content(message: dict[str, Any]) -> str:
    return (message.get("content") or "").strip()


def _calls(message: dict[str, Any]) -> list[tuple[str, str | None]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], parse_json(function["arguments"])) for function in functions]
