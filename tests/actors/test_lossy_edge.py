"""A broker that loses and doubles what recipes stream to gateways: every client gets all of it, once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from actors.gateway import actor as gateway_actor
from actors.recipe.card import ModelCard
from actors.rules import window
from bus import actor as bus_actor
from bus import entrypoints, writer
from run.simulator import RecordingBroker
from tests.actors.clients import BODIES, CHAT_PATH, http
from tests.actors.edge import STOP, STREAM, Edge, edge, submitted
from tests.actors.test_lossy_bus import LossyBroker
from tests.conftest import Run

TEXT = "one two three four five six seven eight nine ten " * 3


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a time waits shortly."""
    monkeypatch.setattr(gateway_actor, "WATCH_S", 0.05)
    monkeypatch.setattr(gateway_actor, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(window, "SILENCE_S", 0.01)
    monkeypatch.setattr(bus_actor, "HEARTBEAT_S", 0.05)


def without_ids(text: str) -> list[str]:
    """Events without what is another one's in each request."""
    lines = [line for line in text.splitlines() if not line.startswith(": ")]
    return [line.split('"created":')[-1].partition(",")[2] if "chat.completion" in line else line for line in lines]


async def ask_all(system: Edge) -> list[httpx.Response]:
    """Some streams and some whole answers, whose tokens come one at a time."""
    entrypoint = system.entrypoint
    entrypoint.is_silent = True
    async with http(system) as client:
        asked = [client.post(CHAT_PATH, json=STREAM) for _ in range(4)]
        asked += [client.post(path, json=body) for path, body in BODIES.items()]
        asking = asyncio.gather(*asked)
        ids = await submitted(entrypoint, len(asked))
        for token in entrypoint.answer:
            for id in ids:
                await entrypoint.emit(id, [token])
            await asyncio.sleep(0.002)  # long enough for most tokens to travel alone
        for id in ids:
            await entrypoint.emit(id, [], STOP)
        return await asking


@pytest.mark.parametrize(("one_in", "verbs"), [(2, "stream"), (3, "stream"), (7, "stream"), (3, ("stream", "probe"))])
def test_lost_and_doubled_items_are_repaired(run_async: Run, card: ModelCard, one_in: int, verbs: Any) -> None:
    async def main() -> None:
        async with edge(card, text=TEXT) as system:
            truth = await ask_all(system)
        broker = LossyBroker(lambda subject: subject.endswith(verbs), one_in)
        async with edge(card, text=TEXT, broker=broker) as system:
            found = await ask_all(system)
            assert broker.num_lost >= 3
        for expected, answer in zip(truth, found, strict=True):
            assert answer.status_code == 200
            if "text/event-stream" in answer.headers["content-type"]:
                assert without_ids(answer.text) == without_ids(expected.text)
            else:
                assert TEXT[:20] in answer.text

    run_async(main())


class Deaf(RecordingBroker):
    """Loses what is streamed to the gateway while told to."""

    is_losing = False

    def publish(self, source, delivery) -> None:  # type: ignore[no-untyped-def]
        if not (self.is_losing and delivery.subject.endswith("g0.stream")):
            super().publish(source, delivery)


def test_what_is_not_kept_any_more_ends_the_stream_with_an_error(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "KEPT_ITEMS", 2)

    async def main() -> None:
        broker = Deaf()
        async with edge(card, broker=broker) as system, http(system) as client:
            system.entrypoint.is_silent = True
            asking = asyncio.create_task(client.post(CHAT_PATH, json=STREAM))
            [id] = await submitted(system.entrypoint)
            tokens = system.entrypoint.answer
            await system.entrypoint.emit(id, tokens[:1])
            async with asyncio.timeout(10):
                while not next(iter(system.gateway._exchanges.values())).stream.next_seq:
                    await asyncio.sleep(0)
            broker.is_losing = True
            for token in tokens[1:]:
                await system.entrypoint.emit(id, [token])
            await system.entrypoint.emit(id, [], STOP)
            async with asyncio.timeout(10):
                while len(system.recipe._open) or system.recipe._writer._gathered["shoal.gateway.g0.stream"].items:
                    await asyncio.sleep(0)
            broker.is_losing = False
            answer = await asking
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert events[-1]["error"]["code"] == "worker_lost"
            assert "[DONE]" not in answer.text

    run_async(main())


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("word", [b"Submit", b"Submitted"])
def test_a_lost_submission_is_made_again(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch, word: bytes, most: int
) -> None:
    monkeypatch.setattr(entrypoints, "ASK_TIMEOUT_S", 0.2)

    class Losing(RecordingBroker):
        num_lost = num_submitted = 0

        def publish(self, source, delivery) -> None:  # type: ignore[no-untyped-def]
            self.num_submitted += delivery.subject.endswith(".submit")
            is_hit = delivery.subject.endswith(".submit") if word == b"Submit" else word in delivery.body
            if is_hit and self.num_lost < most:
                self.num_lost += 1
            else:
                super().publish(source, delivery)

    async def main() -> None:
        broker = Losing()
        async with edge(card, broker=broker) as system, http(system) as client:
            answer = await client.post(CHAT_PATH, json=BODIES[CHAT_PATH])
            if word == b"Submitted":  # the tokens say as much: who is asked again when all have come, begins anew
                assert (broker.num_submitted, broker.num_lost) == (1, 1)
            else:
                assert broker.num_lost == most
            if word == b"Submitted" or most < 3:
                assert answer.status_code == 200 and len(system.entrypoint.submitted) == 1
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")

    run_async(main())
