"""Request bodies of the three protocols."""

from __future__ import annotations

import json
from typing import Any

from actors.recipe.converter import Converter, Prepared
from schemas.api import Protocol

CHAT, RESPONSES, MESSAGES = Protocol.CHAT_COMPLETIONS, Protocol.RESPONSES, Protocol.MESSAGES
GENERATING = (CHAT, RESPONSES, MESSAGES)
ID = "0123456789abcdef0123456789abcdef"


def body(protocol: Protocol, text: str = "Hi", /, **fields: Any) -> dict[str, Any]:
    given = {"input": text} if protocol is RESPONSES else {"messages": [{"role": "user", "content": text}]}
    return {"model": "tiny", **given, **fields}


def prepare(converter: Converter, protocol: Protocol, text: str = "Hi", /, **fields: Any) -> Prepared:
    return prepared(converter, protocol, json.dumps(body(protocol, text, **fields)).encode())


def prepared(converter: Converter, protocol: Protocol, raw: bytes) -> Prepared:
    """A body without images, all the way."""
    return converter.finish(converter.read(protocol, raw), [], 7)
