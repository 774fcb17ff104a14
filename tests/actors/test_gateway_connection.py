"""Connections that never become a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from actors.gateway import asgi
from actors.recipe.card import ModelCard
from tests.actors.edge import edge
from tests.conftest import Run


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(asgi, "REQUEST_S", 0.3)
    yield


HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(b"", b""), (b"POST /v1/mess", b""), (HEAD[:-2], b""), (HEAD, b"HTTP/1.1 400"), (HEAD + b'{"mo', b"HTTP/1.1 400")],
)
@pytest.mark.usefixtures("impatience")
def test_a_request_that_does_not_arrive_is_not_waited_for(
    run_async: Run, card: ModelCard, sent: bytes, expected: bytes
) -> None:
    async def main() -> None:
        async with edge(card, text="Hello") as system:
            reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.port)
            writer.write(sent)
            async with asyncio.timeout(20):
                answer = await reader.read()
            assert answer.startswith(expected) and bool(answer) == bool(expected)
            writer.close()

    run_async(main())
