"""HTTP clients of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai

from tests.actors.edge import Edge

TEXT = "Hello there, 你好!"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"model": "tiny", "messages": MESSAGES},
    RESPONSES_PATH: {"model": "tiny", "input": "Hi"},
    MESSAGES_PATH: {"model": "tiny", "messages": MESSAGES, "max_tokens": 50},
}


@asynccontextmanager
async def http(system: Edge) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=system.url, timeout=20) as client:
        yield client


@asynccontextmanager
async def sdks(system: Edge, key: str = "none") -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    async with (
        openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key=key, max_retries=0) as one,
        anthropic.AsyncAnthropic(base_url=system.url, api_key=key, max_retries=0) as other,
    ):
        yield one, other


def error_of(path: str, body: dict[str, Any]) -> str:
    """The message of an error body, if it has the shape the path's protocol wants."""
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and body["request_id"]
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])
