"""The three public protocols: their ids, and their types in the official library."""

from __future__ import annotations

from typing import Any

import deepseek_recipe as library

from schemas.api import Protocol
from schemas.request import FinishReason

AT_ONCE = (Protocol.MODELS, Protocol.COUNT_TOKENS, Protocol.CANCEL)
"""What is answered without generation."""

REQUESTS: dict[Protocol, Any] = {
    Protocol.CHAT_COMPLETIONS: library.ChatCompletionRequest,
    Protocol.RESPONSES: library.ResponsesRequest,
    Protocol.MESSAGES: library.MessagesRequest,
    Protocol.COUNT_TOKENS: library.MessagesRequest,
}
RESPONSES: dict[Protocol, Any] = {
    Protocol.CHAT_COMPLETIONS: library.ChatCompletionResponse,
    Protocol.RESPONSES: library.ResponsesResponse,
    Protocol.MESSAGES: library.MessagesResponse,
}
REASONS = {
    FinishReason.STOP: library.InferenceFinishReason.Stop,
    FinishReason.LENGTH: library.InferenceFinishReason.Length,
}
_PREFIXES = {Protocol.CHAT_COMPLETIONS: "chatcmpl-", Protocol.RESPONSES: "resp_", Protocol.MESSAGES: "msg_"}


def response_id(protocol: Protocol, request_id: str) -> str:
    """The id a client sees for a request."""
    return _PREFIXES[protocol] + request_id


def request_id_of(id: str) -> str:
    """The request id behind an id a client saw; any other text as it is."""
    for prefix in _PREFIXES.values():
        if id.startswith(prefix):
            return id[len(prefix) :]
    return id
