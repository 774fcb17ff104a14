"""What messages, input items and content blocks may hold: the library drops what it does not know, we refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actors.recipe.fields import FIELDS, Refusal, Use, refuse_unless_neutral
from schemas.api import Protocol
from schemas.failure import Code

_MAX_DEPTH = 4
"""Messages, their blocks, the blocks inside tool results, and one more."""

_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)
_ITEM = {"type", "role", "content", "call_id", "name", "namespace", "arguments", "input", "output"}
_ITEM |= {"id", "status", "phase"}  # what the item was: our own answers have them, and they change nothing
_MESSAGES_BLOCK = {"type", "text", "thinking", "signature", "id", "name", "input", "tool_use_id", "content", "source"}

HONOURED: dict[Protocol, dict[str, set[str]]] = {
    Protocol.CHAT_COMPLETIONS: {
        "messages[]": {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "prefix"},
        "content[]": {"type", "text", "image_url"},
        "tool_calls[]": {"id", "type", "function"},
        "tool_calls[].function": {"name", "arguments"},
    },
    Protocol.RESPONSES: {"input[]": _ITEM, "content[]": {"type", "text", "image_url"}},
    Protocol.MESSAGES: {"messages[]": {"role", "content"}, "content[]": _MESSAGES_BLOCK},
    Protocol.COUNT_TOKENS: {"messages[]": {"role", "content"}, "content[]": _MESSAGES_BLOCK},
}
"""What is understood; the other fields have rows in `FIELDS` under these names, or are unknown."""


def check_parts(protocol: Protocol, body: dict[str, Any]) -> list[str]:
    """The ignored fields that are set inside messages, items and blocks. Raises Refusal naming the first that is
    refused or unknown, or an item of a type that is not served.
    """
    ignored: list[str] = []
    for place, path, part in parts(body):
        if place == "input[]":
            _check_kind(path, part)
        ignored += _check_fields(protocol, place, path, part)
    return ignored


def parts(body: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(kind, path, part) of every message, item and block, each before what it holds."""
    for name in ("messages", "input"):
        for path, part in _members(body.get(name), name):
            yield f"{name}[]", path, part
            yield from _blocks(part, path, 1)
            for inner, call in _members(part.get("tool_calls"), f"{path}.tool_calls"):
                yield "tool_calls[]", inner, call
                if isinstance(function := call.get("function"), dict):
                    yield "tool_calls[].function", f"{inner}.function", function
    yield from _blocks(body, "", 1)


def _blocks(part: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if depth < _MAX_DEPTH:
        for name in ("content", "output") if path else ("system",):
            for inner, block in _members(part.get(name), f"{path}.{name}" if path else name):
                yield "content[]", inner, block
                yield from _blocks(block, inner, depth + 1)


def _members(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, list):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(value) if isinstance(part, dict))


def _check_kind(path: str, item: dict[str, Any]) -> None:
    kind = item.get("type")
    if kind is not None and kind not in _ITEMS:
        message = f"{path}.type {str(kind)[:64]!r} is not supported; supported are {', '.join(_ITEMS)}"
        raise Refusal(Code.UNSUPPORTED, message, f"{path}.type")


def _check_fields(protocol: Protocol, place: str, path: str, part: dict[str, Any]) -> list[str]:
    honoured, ignored = HONOURED[protocol].get(place, set()), []
    if part.get("type") == "reasoning_text":
        return []
    for name, value in part.items():
        if name in honoured or value is None:
            continue
        row = FIELDS[protocol].get(f"{place}.{name}")
        if row is None:
            where = f"{path}.{name[:64]}"
            raise Refusal(Code.BAD_REQUEST, f"unknown field {where!r}", where)
        if row.use is Use.REFUSED:
            refuse_unless_neutral(protocol, f"{place}.{name}", value, f"{path}.{name}")
        elif value not in ("", [], False):
            ignored.append(f"{place}.{name}")
    return ignored
