"""A request body before the library sees it: refused, corrected, or let through, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from actors.recipe.card import ModelCard
from actors.recipe.fields import Refusal, check
from actors.recipe.form import Form, take_form
from actors.recipe.images import Source, take_images
from actors.recipe.parts import check_parts
from actors.recipe.sampling import Choice, boolean, take_choice
from schemas.api import Protocol
from schemas.failure import Code

_DOCUMENTS = ("document", "file", "input_file", "input_audio", "input_video", "video_url", "audio_url")


@dataclass(frozen=True)
class Normal:
    """A body the library understands, with markers for `images`, and what it would lose of the client's wishes."""

    body: dict[str, Any]
    model: str
    ignored: list[str]
    choice: Choice
    form: Form
    exact: bool
    images: list[Source]


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises Refusal."""
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise Refusal(Code.BAD_REQUEST, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(Code.BAD_REQUEST, f"the body is a JSON {type(value).__name__}, not an object")
    return value


def normalise(protocol: Protocol, value: dict[str, Any], card: ModelCard) -> Normal:
    """Check every field, and rewrite what the library would misread. Raises Refusal."""
    body, ignored = check(protocol, value)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal(Code.BAD_REQUEST, "model is missing: give the name of a model as text", "model")
    if model not in card.names:
        message = f"the model `{model[:128]}` does not exist; this server has {', '.join(card.names)}"
        raise Refusal(Code.MODEL_NOT_FOUND, message, "model")
    ignored.extend(_CORRECTIONS[protocol](body))
    for part, content in (("messages", "messages"), ("input", "input"), ("system", "system")):
        _refuse_documents(body.get(part), content)
    ignored.extend(check_parts(protocol, body))
    images, ignored_of_images = take_images(protocol, body, card)
    ignored.extend(ignored_of_images)
    choice, ignored_of_choice = take_choice(protocol, body)
    ignored.extend(ignored_of_choice)
    return Normal(
        body=body,
        model=model,
        ignored=sorted(set(ignored)),
        choice=choice,
        form=take_form(protocol, body),
        exact=boolean(body.pop("exact", False), "exact"),
        images=images,
    )


def _correct_chat(body: dict[str, Any]) -> list[str]:
    ignored: list[str] = []
    longest = body.pop("max_completion_tokens", None)
    if longest is not None:
        if body.get("max_tokens", longest) != longest:
            raise Refusal(Code.BAD_REQUEST, "max_tokens and max_completion_tokens differ", "max_completion_tokens")
        body["max_tokens"] = longest
    if isinstance(body.get("messages"), list):
        messages = [dict(message) if isinstance(message, dict) else message for message in body["messages"]]
        for message in messages:
            if not isinstance(message, dict):
                continue
            if message.get("role") == "developer":
                message["role"] = "system"
            if message.get("tool_calls") == []:
                del message["tool_calls"]
            if message.pop("name", None) is not None:
                ignored.append("messages[].name")
        body["messages"] = messages
    return ignored


def _correct_responses(body: dict[str, Any]) -> list[str]:
    for tool in _dicts(body.get("tools")):
        if tool.get("type") not in ("function", "namespace", "custom"):
            raise Refusal(Code.UNSUPPORTED, f"tools: the type {tool.get('type')!r} is not supported", "tools")
    return []


def _correct_messages(body: dict[str, Any]) -> list[str]:
    if isinstance(body.get("tools"), list):
        body["tools"] = [_without_custom(tool) if isinstance(tool, dict) else tool for tool in body["tools"]]
    return []


_CORRECTIONS = {
    Protocol.CHAT_COMPLETIONS: _correct_chat,
    Protocol.RESPONSES: _correct_responses,
    Protocol.MESSAGES: _correct_messages,
    Protocol.COUNT_TOKENS: _correct_messages,
}


def _without_custom(tool: dict[str, Any]) -> dict[str, Any]:
    """A client tool may say so (`type: custom`); the library knows it only by the absence of a type."""
    return {key: value for key, value in tool.items() if key != "type"} if tool.get("type") == "custom" else tool


def _refuse_documents(value: Any, name: str) -> None:
    """Refuse content that would otherwise be dropped or replaced by a note, wherever it sits."""
    for block in _blocks(value):
        kind = block.get("type")
        if kind in _DOCUMENTS:
            raise Refusal(Code.UNSUPPORTED, f"{name}: content of type {kind!r} is not supported; send text", name)


def _blocks(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Messages, their blocks, and the blocks inside tool results."""
    if depth == 4:
        return
    for item in _dicts(value):
        yield item
        yield from _blocks(item.get("content"), depth + 1)
        yield from _blocks(item.get("output"), depth + 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]
