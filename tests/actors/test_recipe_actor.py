"""The recipe between its doors: NATS clients and gateways on one side, entrypoint shards on the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from actors.recipe import actor as recipe_actor
from actors.recipe import intake
from actors.recipe.actor import Recipe
from actors.recipe.card import ModelCard
from actors.recipe.front import client_of, derived_id
from actors.rules.tenants import Tenants
from bus import bulk
from bus.actor import Actor
from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import Bus, BusError, Delivery
from bus.memory import MemoryWire
from bus.subjects import CALL, LOAD, PROBE, RECIPE_CANCEL, api
from bus.subjects import STREAM as STREAM_SUBJECT
from schemas.api import Answer, Call, Called, Probe, Protocol
from schemas.bulk import Payload
from schemas.failure import Code, Failure
from schemas.message import Role
from schemas.request import Cancel, CancelReason
from schemas.routing import LoadReported
from tests.actors.edge import BODY, CHAT, STOP, STREAM, content, edge, silent, submitted
from tests.bus.conformance import ActorConformance
from tests.conftest import Run


class TestRecipeConformance(ActorConformance):
    """The contract of every actor."""

    @pytest.fixture(autouse=True)
    def _card(self, card: ModelCard) -> None:
        self.card = card

    def make(self, bus: Bus) -> Actor:
        return Recipe("rc0", bus, MemoryBulk(MemoryHub()), self.card, Tenants())


# NATS clients


def test_a_stream_is_numbered_and_ends_with_the_sentinel(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, text="Hello there!") as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            raw = await client.next()
            assert raw.startswith(b'{"seq":0,"id":"chatcmpl-')
            events = [json.loads(raw), *await client.all()]
            assert [event["seq"] for event in events] == list(range(len(events)))
            assert content(events) == "Hello there!"
            assert len(system.recipe._open) == 0

    run_async(main())


def test_every_protocol_in_one_piece(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card, text="Hello there!") as system:
            client = await system.client()
            for protocol, body in (
                (CHAT, BODY),
                (Protocol.RESPONSES, {"model": "tiny", "input": "Hi"}),
                (Protocol.MESSAGES, {**BODY, "max_tokens": 50}),
            ):
                await client.send(protocol, body)
                [answer] = await client.all()
                assert "seq" not in answer
                assert "Hello there!" in json.dumps(answer)
            await client.send(Protocol.COUNT_TOKENS, BODY)
            assert (await client.all())[0]["input_tokens"] > 0
            await client.send(Protocol.MODELS, b"")
            assert (await client.all())[0]["data"][0]["id"] == "shoal-tiny"

    run_async(main())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "bad_request"),
        (b"", "bad_request"),
        (b"[]", "bad_request"),
        ({**BODY, "model": "gpt"}, "model_not_found"),
        ({**BODY, "messages": []}, "bad_request"),
        ({**BODY, "n": 2}, "unsupported"),
        ({**BODY, "max_tokens": 100_000}, "context_length_exceeded"),
        ({**BODY, "messages": [{"role": "user", "content": "word " * 420_000}]}, "context_length_exceeded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_come_as_one_body(run_async: Run, card: ModelCard, body: Any, code: str) -> None:
    async def main() -> None:
        async with edge(card) as system:
            client = await system.client()
            await client.send(CHAT, body)
            [error] = await client.all()
            assert error["error"]["code"] == code
            assert not system.entrypoint.submitted

    run_async(main())


@pytest.mark.parametrize("by", ["label", "response id", "request id"])
def test_cancel(run_async: Run, card: ModelCard, by: str) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client, other = await system.client(), await system.client()
            if by == "label":
                other.name = f"{client_of(client.name)}.r2"
                await other.wire.subscribe(other.name, other.on_delivery)
            await client.send(CHAT, STREAM, {"X-Request-Id": "mine"})
            [id] = await submitted(system.entrypoint)
            assert id == derived_id("public", client_of(client.name), "mine")
            name = {"label": "mine", "response id": f"chatcmpl-{id}", "request id": id}[by]
            await other.send(Protocol.CANCEL, {"id": name})
            assert await other.all() == [{"id": name, "object": "cancel", "cancelled": True}]
            assert (await client.all())[0]["error"]["code"] == "cancelled"
            assert system.entrypoint.cancelled[id].reason is CancelReason.CLIENT
            await other.send(Protocol.CANCEL, {"id": name})
            assert await other.all() == [{"id": name, "object": "cancel", "cancelled": False}]
            await other.send(Protocol.CANCEL, {})
            assert (await other.all())[0]["error"]["code"] == "bad_request"

    run_async(main())


def test_only_an_inbox_is_answered(run_async: Run, card: ModelCard) -> None:
    """A client must not make us publish for it where it may not publish itself."""

    async def main() -> None:
        async with edge(card, text="Hello there!") as system:
            client = await system.client()
            heard: list[Delivery] = []
            await client.wire.subscribe("shoal.entrypoint.victim.*", heard.append)
            await client.wire.publish(api(CHAT), json.dumps(BODY).encode(), reply="shoal.entrypoint.victim.cancel")
            await client.wire.publish(api(CHAT), b"nonsense", reply="shoal.entrypoint.victim.cancel")
            await client.send(CHAT, BODY)
            assert await client.all()
            assert heard == []

    run_async(main())


def test_two_requests_of_one_name(run_async: Run, card: ModelCard) -> None:
    """The second is refused, and does the first no harm even when nobody listens for its answer."""

    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM, {"x-request-id": "mine"})
            [id] = await submitted(system.entrypoint)
            headers, raw = {"x-request-id": "mine"}, json.dumps(STREAM).encode()
            await client.wire.publish(api(CHAT), raw, reply=f"{client_of(client.name)}.nobody", headers=headers)
            client.name = f"{client_of(client.name)}.r2"
            await client.wire.subscribe(client.name, client.on_delivery)
            await client.send(CHAT, STREAM, headers)
            assert (await client.all())[0]["error"]["code"] == "duplicate_request"
            await system.entrypoint.emit(id, [300], STOP)
            assert (await client.all())[-1]["choices"][0]["finish_reason"] == "stop"

    run_async(main())


def test_a_label_is_its_clients_own(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            first, second = await system.client(), await system.client()
            for num, client in enumerate((first, second), 1):
                await client.send(CHAT, STREAM, {"x-request-id": "mine"})
                await submitted(system.entrypoint, num)
            theirs, ours = system.entrypoint.submitted
            await second.send(Protocol.CANCEL, {"id": "mine"})
            await system.entrypoint.until(lambda: ours in system.entrypoint.cancelled)
            assert theirs not in system.entrypoint.cancelled
            await system.entrypoint.emit(theirs, [300], STOP)
            assert (await first.all())[-1]["choices"][0]["finish_reason"] == "stop"

    run_async(main())


@pytest.mark.parametrize("protocol", [CHAT, Protocol.MESSAGES, Protocol.COUNT_TOKENS, Protocol.CANCEL])
def test_one_request_too_many(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch, protocol: Protocol
) -> None:
    monkeypatch.setattr(intake, "MAX_OPEN", 1)

    async def main() -> None:
        async with silent(card) as system:
            client, other = await system.client(), await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            await other.send(protocol, BODY)
            [error] = await other.all()
            assert (error.get("type") == "error") is (protocol in (Protocol.MESSAGES, Protocol.COUNT_TOKENS))
            assert "limit" in error["error"]["message"]
            with pytest.raises(BusError) as refused:
                await system.gateway.bus.ask(CALL.any(), call(BODY, protocol=protocol), timeout_s=5)
            assert refused.value.code is Code.OVERLOADED
            await system.entrypoint.emit(id, [300], STOP)
            assert (await client.all())[-1]["choices"][0]["finish_reason"] == "stop"
            await other.send(Protocol.COUNT_TOKENS, BODY)
            assert (await other.all())[0]["input_tokens"] > 0

    run_async(main())


def test_a_prompt_that_no_shard_takes_is_not_left_on_offer(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "INLINE_BYTES", 4)

    async def main() -> None:
        async with edge(card) as system:
            system.entrypoint.refusal = Failure(code=Code.OVERLOADED, message="too many")
            client = await system.client()
            await client.send(CHAT, STREAM)
            assert (await client.all())[0]["error"]["code"] == "overloaded"
            assert system.recipe._bulk.num_offers == 0
            system.entrypoint.refusal = None
            await client.send(CHAT, STREAM)
            assert content(await client.all()) == "Hello there!"
            assert system.recipe._bulk.num_offers == 1, "the shard pulls it when it likes"

    run_async(main())


def test_nothing_is_kept_of_requests_that_are_over(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_actor, "WATCH_S", 0.01)

    async def main() -> None:
        async with edge(card) as system:
            client, bus = await system.client(), Bus(MemoryWire(system.broker))
            await bus.open()
            stop = await bus.wire.subscribe(STREAM_SUBJECT.at("gx").name, lambda _: None)
            for body in (STREAM, BODY, {**BODY, "n": 2}):
                await client.send(CHAT, body)
                await client.all()
                await bus.ask(CALL.any(), call(body), timeout_s=5)
            async with asyncio.timeout(10):
                while system.recipe._writer._gathered or system.recipe.bus._watched or len(system.recipe._open):
                    await asyncio.sleep(0.01)
            intake = system.recipe._intake
            assert (intake.num_calls, intake.num_bytes, system.recipe._writer._windows._windows) == (0, 0, {})
            await stop()
            await bus.close()

    run_async(main())


def test_a_vanished_client_is_a_cancel(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            await client.wire.close()
            await system.entrypoint.emit(id, [300])
            await system.entrypoint.until(lambda: id in system.entrypoint.cancelled)
            assert system.entrypoint.cancelled[id].reason is CancelReason.CLIENT_GONE
            assert len(system.recipe._open) == 0

    run_async(main())


def test_nonsense_in_headers(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system:
            client = await system.client()
            headers = {"traceparent": "nonsense", "Shoal-Deadline-Ns": "soon", "x-request-id": ""}
            await client.send(CHAT, BODY, headers)
            [answer] = await client.all()
            assert answer["object"] == "chat.completion"

    run_async(main())


def test_a_deadline_travels(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system:
            client = await system.client()
            await client.send(CHAT, BODY, {"Shoal-Deadline-Ns": "9000000000000000000"})
            await client.all()
            [submit] = system.entrypoint.submitted.values()
            assert submit.limits.deadline_ns == 9_000_000_000_000_000_000

    run_async(main())


# Gateways


def call(body: Any, stream_id: int = 1, protocol: Protocol = CHAT) -> Call:
    raw = Payload(inline=body if isinstance(body, bytes) else json.dumps(body).encode())
    return Call(stream_id=stream_id, gateway="gx", protocol=protocol, body=raw, request_id=f"{stream_id:032x}")


def test_a_call_is_answered(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            bus = system.gateway.bus
            called = await bus.ask(CALL.any(), call({**STREAM, "user": "u"}), timeout_s=5)
            assert called == Called(recipe="rc0", request_id=f"{1:032x}", is_stream=True, ignored=["user"])
            answer = await bus.ask(CALL.any(), call({**BODY, "n": 2}, 2), timeout_s=5)
            assert isinstance(answer, Answer)
            assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "n")
            probed = await bus.ask(PROBE.any(), Probe(gateway="gx", stream_ids=[1, 2]), timeout_s=5)
            assert probed.next_seqs == [0, -1]
            await system.recipe.drain()
            with pytest.raises(Exception, match="takes no new requests"):
                await bus.ask(CALL.any(), call(BODY, 3), timeout_s=5)

    run_async(main())


def test_a_cancel_right_behind_a_call_finds_it(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            bus = system.gateway.bus
            asking = asyncio.create_task(bus.ask(CALL.any(), call(STREAM), timeout_s=5))
            await asyncio.sleep(0)
            await bus.tell(RECIPE_CANCEL.all(), Cancel(request_id=f"{1:032x}"))
            with contextlib.suppress(BusError):
                await asking
            await system.entrypoint.until(lambda: len(system.entrypoint.cancelled) == len(system.entrypoint.submitted))
            async with asyncio.timeout(10):
                while len(system.recipe._open):
                    await asyncio.sleep(0)

    run_async(main())


def test_a_gateway_that_died_cancels_its_requests(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            await system.gateway.bus.ask(CALL.any(), call(STREAM), timeout_s=5)  # "gx" listens nowhere
            [id] = await submitted(system.entrypoint)
            await system.entrypoint.emit(id, [300])
            await system.entrypoint.until(lambda: id in system.entrypoint.cancelled)
            assert system.entrypoint.cancelled[id].reason is CancelReason.CLIENT_GONE

    run_async(main())


def test_stopping_ends_every_request(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            system.tasks["r"].cancel()
            await asyncio.wait([system.tasks["r"]])
            assert (await client.all())[0]["error"]["code"] == "shutting_down"
            await system.entrypoint.until(lambda: id in system.entrypoint.cancelled)

    run_async(main())


def test_another_shard_takes_over(run_async: Run, card: ModelCard) -> None:
    """A shard that is gone but not yet missed costs one try, not the request."""

    async def main() -> None:
        async with edge(card) as system:
            bus = Bus(MemoryWire(system.broker))
            await bus.open()
            for ghost in ("e1", "e2", "e3"):
                report = LoadReported(role=Role.ENTRYPOINT, id=ghost, incarnation="x", seq=1, pid=1, host="h")
                await bus.tell(LOAD.at(Role.ENTRYPOINT), report)
            client = await system.client()
            for _ in range(8):
                await client.send(CHAT, STREAM)
                assert content(await client.all()) == "Hello there!"
            await bus.close()

    run_async(main())


def test_a_draining_recipe_leaves_the_public_subjects(run_async: Run, card: ModelCard) -> None:
    """Nobody listens there any more, so another recipe gets the next request; what runs goes on."""

    async def main() -> None:
        async with silent(card) as system:
            client, late = await system.client(), await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            await system.recipe.drain()
            await late.send(CHAT, STREAM)
            assert await late.next() == b""  # the broker's own answer: no responders
            await system.entrypoint.emit(id, system.entrypoint.answer, STOP)
            assert content(await client.all()) == "Hello there!"

    run_async(main())
