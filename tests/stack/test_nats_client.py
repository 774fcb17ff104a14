"""A bare NATS client with the client user's rights: streams, cancel, discovery, and what it may not do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.aio.client import Client

from tests.stack.conftest import SERVING, System

pytestmark = pytest.mark.stack

BODY = {"model": "shoal-tiny", "messages": [{"role": "user", "content": "Say something."}], "temperature": 0}


async def events(
    client: Client, body: dict[str, Any], headers: dict[str, str] | None = None, subject: str = "chat_completions"
) -> list[dict[str, Any]]:
    """All events of one request, up to the empty payload."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(f"shoal.api.{subject}", json.dumps(body).encode(), reply=inbox, headers=headers)
    got = []
    while (message := await subscription.next_msg(timeout=30)).data:
        got.append(json.loads(message.data))
    await subscription.unsubscribe()
    return got


def test_streams_end_with_the_empty_payload_and_are_numbered(stack: System) -> None:
    async def main() -> None:
        async with stack.client() as client:
            got = await events(client, {**BODY, "stream": True, "max_tokens": 10})
            assert [event["seq"] for event in got] == list(range(len(got)))
            assert got[-1]["choices"][0]["finish_reason"] in ("length", "stop")
            (whole,) = await events(client, {**BODY, "max_tokens": 10})
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in got)
            assert text == whole["choices"][0]["message"]["content"]

    asyncio.run(main())


def test_errors_are_the_protocols_own_and_end_the_stream(stack: System) -> None:
    async def main() -> None:
        async with stack.client() as client:
            (error,) = await events(client, {**BODY, "model": "nothing", "stream": True})
            assert error["error"]["code"] == "model_not_found"

    asyncio.run(main())


def test_cancel_ends_the_stream_early_and_is_acknowledged(stack: System) -> None:
    async def main() -> None:
        async with stack.client() as client:
            body = {**BODY, "stream": True, "max_tokens": 4000, "temperature": 1}
            running = asyncio.create_task(events(client, body, {"x-request-id": "my-own-name"}))
            name = json.dumps({"id": "my-own-name"}).encode()
            acknowledged: dict[str, Any] = {}
            while not acknowledged.get("cancelled"):
                acknowledged = json.loads((await client.request("shoal.api.cancel", name, timeout=10)).data)
            assert len(await running) < 4000
            again = await client.request("shoal.api.cancel", name, timeout=10)
            assert json.loads(again.data)["cancelled"] is False

    asyncio.run(main())


def test_tenants_have_users_and_limits_of_their_own(stack: System) -> None:
    async def main() -> None:
        async with stack.client("acme") as acme, stack.client("beta") as beta, stack.client() as plain:
            body = {**BODY, "max_tokens": 3}
            for _ in range(2):
                (answer,) = await events(acme, body, subject="acme.chat_completions")
                assert answer["object"] == "chat.completion"
            (error,) = await events(acme, body, subject="acme.chat_completions")
            assert error["error"]["code"] == "rate_limit_exceeded"
            for client, subject in ((beta, "beta.chat_completions"), (plain, "chat_completions")) * 3:
                (answer,) = await events(client, body, subject=subject)
                assert answer["object"] == "chat.completion"

    asyncio.run(main())


def test_another_ones_inbox_and_internal_subjects_are_closed(stack: System) -> None:
    async def main() -> None:
        async with stack.client() as client:
            errors: list[Exception] = []

            async def on_error(error: Exception) -> None:
                errors.append(error)

            client._error_cb = on_error
            await client.subscribe("_INBOX.>")
            await client.subscribe("shoal.>")
            await client.publish("shoal.entrypoint.e0.cancel", b"")
            await client.flush()
            async with asyncio.timeout(10):
                while len(errors) < 3:
                    await asyncio.sleep(0.01)
            assert all("permissions violation" in str(error) for error in errors)

    asyncio.run(main())


def test_every_actor_is_listed_as_a_service(stack: System) -> None:
    async def main() -> None:
        async with stack.client() as client:
            inbox = client.new_inbox()
            names: set[str] = set()

            async def on_pong(message: Any) -> None:
                names.add(json.loads(message.data)["name"])

            await client.subscribe(inbox, cb=on_pong)
            await client.publish("$SRV.PING", b"", reply=inbox)
            async with asyncio.timeout(10):
                while not {f"shoal-{role}" for role in SERVING} <= names:
                    await asyncio.sleep(0.01)
            info = await client.request("$SRV.INFO.shoal-decode", b"", timeout=5)
            assert json.loads(info.data)["metadata"]["id"] == "d0"

    asyncio.run(main())
