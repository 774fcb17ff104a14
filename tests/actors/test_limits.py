"""Tenants at both doors: whose a request is, what it may use, whose cache it meets, who may cancel it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from actors.gateway.http import Request
from actors.quota.actor import Quota
from actors.recipe.card import ModelCard
from actors.rules.tenants import is_id_of
from bus import limits
from bus.bus import Bus, Delivery
from bus.memory import MemoryWire
from bus.subjects import INBOX_PREFIX, api, tenant_inbox
from schemas.api import Protocol
from schemas.failure import Code, Failure
from tests.actors.clients import BODIES, CHAT_PATH, MESSAGES, MESSAGES_PATH, error_of, http, sdks
from tests.actors.edge import BODY, CHAT, STREAM, Edge, content, edge, submitted
from tests.conftest import Run

ONE = '[tenants.acme]\nkeys = ["sk-acme"]\nrequests_per_minute = 1\n[tenants.beta]\nkeys = ["sk-beta"]\n'
FEW = '[tenants.acme]\nkeys = ["sk-acme"]\ntokens_per_minute = 500\n'
ACME = {"x-api-key": "sk-acme"}


async def settled(system: Edge) -> None:
    """Return when the quota actor has heard of the end of every request."""
    async with asyncio.timeout(10):
        while len(system.quota._ledger):
            await asyncio.sleep(0.001)


def is_wait(error: openai.RateLimitError | anthropic.RateLimitError, most_s: int) -> bool:
    """Does it say how long to wait, as both SDKs read it?"""
    headers = error.response.headers
    return 1 <= int(headers["retry-after"]) <= most_s and headers["x-should-retry"] == "true"


def test_the_sdks_raise_their_rate_limit_error(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, tenants=ONE) as system, sdks(system, "sk-acme") as (one, other):
            await one.chat.completions.create(model="tiny", messages=MESSAGES)
            calls: list[Any] = [
                lambda stream: one.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream),
                lambda stream: one.responses.create(model="tiny", input="Hi", stream=stream),
            ]
            for call in calls:
                for stream in (False, True):
                    with pytest.raises(openai.RateLimitError, match="limit of 1 requests a minute") as caught:
                        await call(stream)
                    assert is_wait(caught.value, 60)
                    assert (caught.value.type, caught.value.code) == ("rate_limit_error", "rate_limit_exceeded")
            for stream in (False, True):
                with pytest.raises(anthropic.RateLimitError, match="retry in 60 s") as refused:
                    await other.messages.create(model="tiny", messages=MESSAGES, max_tokens=9, stream=stream)
                assert is_wait(refused.value, 60)
                body: Any = refused.value.body
                assert body["error"]["type"] == "rate_limit_error" and body["request_id"]
            assert len(system.entrypoint.submitted) == 1
            await other.messages.count_tokens(model="tiny", messages=MESSAGES)
            assert [model.id async for model in one.models.list()] == ["shoal-tiny", "tiny"]
        async with edge(card, tenants=ONE) as system, sdks(system, "sk-acme") as (one, other):
            for _ in range(3):
                await other.messages.count_tokens(model="tiny", messages=MESSAGES)
            await one.chat.completions.create(model="tiny", messages=MESSAGES)

    run_async(main())


@pytest.mark.parametrize(("wait_s", "said"), [(0.001, b"1"), (1.2, b"2"), (60.0, b"60")])
def test_the_header_never_says_too_little(wait_s: float, said: bytes) -> None:
    refused = Failure(code=Code.RATE_LIMITED, message="", retry_after_s=wait_s)
    assert dict(Request("POST", CHAT_PATH, {}, "1").refusal(refused).headers)[b"retry-after"] == said


def test_one_tenants_limit_is_not_anothers(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, tenants=ONE, keys="more=acme,plain") as system, http(system) as client:

            async def post(key: str) -> int:
                return (await client.post(CHAT_PATH, json=BODY, headers={"x-api-key": key})).status_code

            assert [await post(key) for key in ("sk-acme", "more", "sk-acme")] == [200, 429, 429]
            assert [await post(key) for key in ("sk-beta", "plain")] * 2 == [200] * 4
            assert await post("unknown") == 401
            tenants = [submit.tenant for submit in system.entrypoint.submitted.values()]
            assert tenants == ["acme", "beta", "public"]
            assert all(is_id_of(submit.tenant, id) for id, submit in system.entrypoint.submitted.items())

    run_async(main())


@pytest.mark.parametrize("path", BODIES)
def test_output_is_charged_when_a_request_has_ended(run_async: Run, card: ModelCard, path: str) -> None:
    async def main() -> None:
        async with edge(card, tenants=FEW, text="word " * 700) as system, http(system) as client:
            body = {**BODIES[path], "max_output_tokens" if "responses" in path else "max_tokens": 600}
            answer = await client.post(path, json=body, headers=ACME)
            assert answer.status_code == 200
            num_prompt = next(iter(system.entrypoint.submitted.values())).num_prompt_tokens
            await settled(system)
            refused = await client.post(path, json=body, headers=ACME)
            assert refused.status_code == 429 and "limit of 500 tokens a minute" in error_of(path, refused.json())
            # 600 and two prompts, of 500 a minute: the answer itself took no more than some seconds.
            assert int(refused.headers["retry-after"]) == pytest.approx((100 + 2 * num_prompt) * 60 / 500, abs=10)

    run_async(main())


@pytest.mark.parametrize("how", ["cancelled", "no shard"])
def test_a_request_that_ends_early_is_ended_at_the_quota_actor_too(run_async: Run, card: ModelCard, how: str) -> None:
    async def main() -> None:
        async with edge(card, tenants=FEW) as system:
            system.entrypoint.is_silent = True
            client = await system.client("acme")
            if how == "no shard":
                system.entrypoint.refusal = Failure(code=Code.OVERLOADED, message="too many")
            await client.send(CHAT, {**STREAM, "max_tokens": 1000}, {"x-request-id": "mine"})
            if how == "cancelled":
                [id] = await submitted(system.entrypoint)
                assert len(system.quota._ledger) == 1
                await system.entrypoint.emit(id, [300] * 10)
                assert await client.next()
                await client.send(Protocol.CANCEL, {"id": "mine"})
            assert await client.all()
            await settled(system)
            assert system.quota._ledger.admit("acme", "2", 500, 0) != (0, ""), "its prompt was charged"
            assert not system.recipe._quota._asked

    run_async(main())


def test_a_nats_client_is_told_in_its_protocols_words(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, tenants=ONE) as system:
            acme, beta, plain = [await system.client(tenant) for tenant in ("acme", "beta", "")]
            await acme.send(CHAT, STREAM)
            assert content(await acme.all()) == "Hello there!"
            for body in (BODY, STREAM):
                await acme.send(CHAT, body)
                [error] = await acme.all()
                assert error["error"]["code"] == "rate_limit_exceeded" and "retry in" in error["error"]["message"]
            await acme.send(Protocol.MESSAGES, {**BODY, "max_tokens": 5})
            assert (await acme.all())[0]["error"]["type"] == "rate_limit_error"
            for client in (beta, plain, beta, plain):
                await client.send(CHAT, STREAM)
                assert content(await client.all()) == "Hello there!"
            await acme.send(Protocol.MODELS, b"")
            assert (await acme.all())[0]["object"] == "list"
            assert [s.tenant for s in system.entrypoint.submitted.values()] == ["acme", *["beta", "public"] * 2]

    run_async(main())


def test_caches_are_apart_unless_their_tenants_share_a_group(run_async: Run, card: ModelCard) -> None:
    shared = '[tenants.a]\ncache = "g"\n[tenants.b]\ncache = "g"\n[tenants.g]\nkeys = ["sk-g"]\n'

    async def main() -> None:
        async with edge(card, tenants=shared, keys="plain,sk-a=a") as system, http(system) as client:
            for tenant in ("a", "b", "g", ""):
                nats = await system.client(tenant)
                await nats.send(CHAT, BODY)
                await nats.all()
            for key in ("sk-a", "sk-g", "plain"):
                assert (await client.post(CHAT_PATH, json=BODY, headers={"x-api-key": key})).status_code == 200
            caches = [submit.cache for submit in system.entrypoint.submitted.values()]
            a, b, g, public, again_a, again_g, again_public = caches
            assert a == b == again_a and g == again_g and public == again_public
            assert len({a, g, public}) == 3

    run_async(main())


def test_only_its_own_tenant_can_cancel_a_request(run_async: Run, card: ModelCard) -> None:
    """Whatever it knows of it, and at whichever door it came in."""

    async def main() -> None:
        async with edge(card, tenants=ONE) as system, http(system) as web:
            system.entrypoint.is_silent = True
            acme, beta, plain = [await system.client(tenant) for tenant in ("acme", "beta", "")]
            await beta.send(CHAT, STREAM, {"x-request-id": "mine"})
            posting = asyncio.create_task(web.post(CHAT_PATH, json=BODY, headers={"x-api-key": "sk-beta"}))
            ids = await submitted(system.entrypoint, 2)
            for other in (acme, plain):
                for name in ("mine", *ids, *(f"chatcmpl-{id}" for id in ids)):
                    await other.send(Protocol.CANCEL, {"id": name})
                    assert (await other.all())[0]["cancelled"] is False
            assert not system.entrypoint.cancelled
            again = await system.client("beta")
            for name in ("mine", f"chatcmpl-{ids[1]}"):
                await again.send(Protocol.CANCEL, {"id": name})
                assert (await again.all())[0]["cancelled"] is True
            assert (await posting).status_code == 499
            assert set(system.entrypoint.cancelled) == set(ids)
            assert (await beta.all())[0]["error"]["code"] == "cancelled"

    run_async(main())


def test_nobody_is_answered_in_anothers_inbox(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, tenants=ONE) as system:
            wire, heard = MemoryWire(system.broker), list[Delivery]()
            await wire.subscribe(f"{INBOX_PREFIX}>", heard.append)
            raw, inbox = json.dumps(BODY).encode(), tenant_inbox("acme")
            for tenant, reply in (
                ("", f"{inbox}.r1"),
                ("beta", f"{inbox}.r1"),
                ("beta", f"{INBOX_PREFIX}plain.r1"),
                ("acme", f"{inbox}-2.r1"),
                ("acme", inbox),
            ):
                for protocol in Protocol:
                    await wire.publish(api(protocol, tenant), raw, reply=reply)
            await wire.publish(api(CHAT, "acme"), raw, reply=f"{inbox}.r1")
            await submitted(system.entrypoint)
            async with asyncio.timeout(10):
                while len(heard) < 2:
                    await asyncio.sleep(0.001)
            assert {delivery.subject for delivery in heard} == {f"{inbox}.r1"} and len(heard) == 2
            assert len(system.entrypoint.submitted) == 1

    run_async(main())


def test_without_a_quota_actor_limited_tenants_wait_and_others_do_not(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with edge(card, tenants=ONE) as system, http(system) as client:
            await system.kill("q")
            assert (await client.post(CHAT_PATH, json=BODY, headers={"x-api-key": "sk-beta"})).status_code == 200
            monkeypatch.setattr(limits, "PATIENCE_S", 0.3)
            refused = await client.post(MESSAGES_PATH, json=BODIES[MESSAGES_PATH], headers=ACME)
            assert refused.status_code == 503 and refused.headers["x-should-retry"] == "true"
            assert "no quota actor" in error_of(MESSAGES_PATH, refused.json())
            assert len(system.entrypoint.submitted) == 1
            monkeypatch.setattr(limits, "PATIENCE_S", 20.0)
            posting = asyncio.create_task(client.post(CHAT_PATH, json=BODY, headers=ACME))
            bus = Bus(MemoryWire(system.broker))
            await bus.open()
            await system.start("q2", Quota("q0", bus, system.recipe._tenants))
            assert (await posting).status_code == 200

    run_async(main())


def test_a_recipe_that_stops_tells_what_was_used(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, tenants=FEW) as system:
            system.entrypoint.is_silent = True
            client = await system.client("acme")
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            await system.entrypoint.emit(id, [300] * 10)
            assert await client.next()
            system.tasks["r"].cancel()
            await asyncio.wait([system.tasks["r"]])
            assert len(system.quota._ledger) == 0

    run_async(main())
