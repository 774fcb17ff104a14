"""What the official library says of a body that it does not take, and the field that it speaks of."""

from __future__ import annotations

import re

import orjson

from actors.recipe.fields import FIELDS, Refusal
from schemas.api import Protocol
from schemas.failure import Code

FORMAT = {
    Protocol.CHAT_COMPLETIONS: "response_format",
    Protocol.RESPONSES: "text.format",
    Protocol.MESSAGES: "output_config.format",
    Protocol.COUNT_TOKENS: "output_config.format",
}
"""Where the protocols have the form of the answer."""

_QUOTED = re.compile(r"Invalid '([a-z_.]+(?:\[\d+\][a-z_.]*)?)'")
_NAMED = re.compile(r"Invalid ([a-z_]+) value")
_TOOLS = ("Invalid schema for function", "Tool names", "tools[")


def complaint(protocol: Protocol, error: Exception) -> Refusal:
    """The refusal of a body, by what the library raised."""
    message = said(error)
    return Refusal(Code.BAD_REQUEST, message, _field(protocol, message))


def said(error: Exception) -> str:
    """Its words for the client."""
    try:
        return str(orjson.loads(error.body)["error"]["message"])  # type: ignore[attr-defined]
    except (AttributeError, ValueError, LookupError, TypeError):
        return str(error)


def _field(protocol: Protocol, message: str) -> str:
    """Empty where the words do not tell."""
    if quoted := _QUOTED.match(message):
        return quoted[1]
    if (named := _NAMED.match(message)) and named[1] in FIELDS[protocol]:
        return named[1]
    if message.startswith("Invalid json schema"):
        return FORMAT[protocol]
    return "tools" if message.startswith(_TOOLS) else ""
