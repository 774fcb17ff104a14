"""The recipe when tokens, ends, shards and gateways get lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec import structs

from actors.recipe import requests
from actors.recipe.card import ModelCard
from actors.recipe.requests import OpenRequests
from actors.recipe.submission import MAX_LOSSES
from bus.bus import Bus, Delivery
from bus.memory import MemoryBroker, MemoryWire
from bus.subjects import EXITED, INTERNAL_INBOX, LOAD, RECIPE_TOKENS
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.request import CancelReason, Failed, Finished, FinishReason, TokensEmitted
from tests.actors.edge import CHAT, STOP, STREAM, Edge, FakeEntrypoint, content, edge, output_of, silent, submitted
from tests.conftest import Run


def test_a_stop_sequence_ends_the_request_at_the_shard(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, {**STREAM, "stop": "there"})
            [id] = await submitted(system.entrypoint)
            for token in system.entrypoint.answer:
                await system.entrypoint.emit(id, [token])
            events = await client.all()
            assert content(events) == "Hello "
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
            await system.entrypoint.until(lambda: id in system.entrypoint.cancelled)
            assert system.entrypoint.cancelled[id].reason is CancelReason.STOP_SEQUENCE

    run_async(main())


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_sequence_at_the_limit_stops_and_cancels_nobody(run_async: Run, card: ModelCard, cut: int) -> None:
    """A step gave several tokens, the last with the end: the stop sequence is complete with it, or before."""

    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, {**STREAM, "stop": ["there!", "e!"], "max_tokens": len(system.entrypoint.answer)})
            [id] = await submitted(system.entrypoint)
            answer = system.entrypoint.answer
            await system.entrypoint.emit(id, answer[:-cut])
            await system.entrypoint.emit(id, answer[-cut:], Finished(reason=FinishReason.LENGTH))
            events = await client.all()
            assert content(events) == "Hello "
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
            assert events[-1]["usage"]["completion_tokens"] == len(answer)
            assert len(system.recipe._open) == 0 and system.entrypoint.cancelled == {}

    run_async(main())


def test_repeated_and_lost_tokens(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            entrypoint = system.entrypoint
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(entrypoint)
            answer = entrypoint.answer
            await entrypoint.emit(id, answer[:2])
            again = TokensEmitted(
                source="entrypoint/e0", request_ids=[id], epochs=[1], first_indexes=[0], counts=[2], tokens=answer[:2]
            )
            await entrypoint.bus.tell(RECIPE_TOKENS.at("rc0"), again)
            await entrypoint.emit(id, answer[2:3], is_lost=True)
            await entrypoint.emit(id, answer[3:], STOP)
            assert content(await client.all()) == "Hello there!"
            assert [resend.first_indexes for resend in entrypoint.resends] == [[2]]

    run_async(main())


def test_a_lost_end_is_found(run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SILENCE_S", 0.2)

    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            await system.entrypoint.emit(id, system.entrypoint.answer, STOP, is_lost=True)
            assert content(await client.all()) == "Hello there!"

    run_async(main())


async def successor(system: Edge, id: str) -> FakeEntrypoint:
    bus = Bus(MemoryWire(system.broker))
    await bus.open()
    made = FakeEntrypoint(id, bus, system.entrypoint.answer)
    await system.start(id, made)
    return made


def test_a_request_waits_for_a_shard(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with edge(card) as system:
            await system.kill("e")
            client = await system.client()
            await client.send(CHAT, STREAM)
            await asyncio.sleep(0.05)
            await successor(system, "e0")
            assert content(await client.all()) == "Hello there!"

    run_async(main())


@pytest.mark.parametrize("num_told", [0, 2])
@pytest.mark.parametrize("how", ["forgets", "dies", "stops"])
def test_what_a_shard_loses_goes_on(run_async: Run, card: ModelCard, how: str, num_told: int) -> None:
    """A restarted shard says so of the requests it does not know; one that stops, of all it has; of a dead one its
    supervisor does."""

    async def main() -> None:
        async with silent(card) as system:
            first, bus = system.entrypoint, system.gateway.bus
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(first)
            await first.emit(id, first.answer[:num_told])
            request = system.recipe._open.get(id)
            while request is not None and request.next_index < num_told:
                await asyncio.sleep(0.01)
            if how == "stops":
                await first.emit(id, [], Failed(failure=Failure(code=Code.SHUTTING_DOWN, message="stops")))
            if how == "forgets":
                del first.held[id]
                await bus.tell(LOAD.at(Role.ENTRYPOINT), structs.replace(first.load(), incarnation="new"))
            if how == "dies":
                await system.kill("e")
                exited = ProcessExited(name="front", pid=bus.seams.pid, members=["entrypoint/e0"])
                await bus.tell(EXITED.all(), exited)
                await asyncio.sleep(0.05)
                first = await successor(system, "e1")
                first.is_silent = True
            await first.until(lambda: f"{id}-1" in first.submitted)
            moved = first.submitted[f"{id}-1"]
            assert output_of(moved) == first.answer[:num_told] and moved.num_output == num_told
            late = TokensEmitted(
                source="entrypoint/e0", request_ids=[id], epochs=[1], first_indexes=[num_told], counts=[1], tokens=[999]
            )
            await bus.tell(RECIPE_TOKENS.at("rc0"), late)  # what it had is another's now
            await first.emit(f"{id}-1", first.answer[num_told:], STOP)
            events = await client.all()
            assert content(events) == "Hello there!"
            assert events[-1]["usage"]["completion_tokens"] == len(first.answer)
            assert len(system.recipe._open) == 0

    run_async(main())


def test_a_request_moves_so_often_and_then_it_ends(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            for number in range(MAX_LOSSES + 1):
                id = (await submitted(system.entrypoint, number + 1))[-1]
                await system.entrypoint.emit(id, [], Failed(failure=Failure(code=Code.SHUTTING_DOWN, message="stops")))
            assert (await client.all())[0]["error"]["code"] == "shutting_down"
            assert len(system.entrypoint.submitted) == MAX_LOSSES + 1

    run_async(main())


@pytest.mark.parametrize("code", [Code.OVERLOADED, Code.SHUTTING_DOWN])
def test_a_shard_that_cannot_take_a_moved_request_is_asked_again(run_async: Run, card: ModelCard, code: Code) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            system.entrypoint.refusal = Failure(code=code, message="not now")
            await system.entrypoint.emit(id, [], Failed(failure=Failure(code=Code.SHUTTING_DOWN, message="stops")))
            await asyncio.sleep(0.05)
            system.entrypoint.refusal = None
            await submitted(system.entrypoint, 2)
            await system.entrypoint.emit(f"{id}-1", system.entrypoint.answer, STOP)
            assert content(await client.all()) == "Hello there!"

    run_async(main())


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_a_moved_request_is_cancelled_by_its_first_id(run_async: Run, card: ModelCard, is_elsewhere: bool) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            await system.entrypoint.emit(id, [], Failed(failure=Failure(code=Code.SHUTTING_DOWN, message="stops")))
            await submitted(system.entrypoint, 2)
            open_here = system.recipe._open
            if is_elsewhere:  # this recipe is another one meanwhile
                system.recipe._open = OpenRequests()
            canceller = await system.client()
            canceller.name = client.name + ".x"
            await canceller.wire.subscribe(canceller.name, canceller.on_delivery)
            await canceller.send(Protocol.CANCEL, {"id": id})
            assert json.loads(await canceller.next())["cancelled"] is True
            system.recipe._open = open_here
            assert list(system.entrypoint.cancelled) == [f"{id}-1"]

    run_async(main())


def test_word_of_the_end_of_an_earlier_process_of_a_shard_ends_nothing(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            exited = ProcessExited(name="front", pid=system.gateway.bus.seams.pid + 1, members=["entrypoint/e0"])
            await system.gateway.bus.tell(EXITED.all(), exited)
            await system.entrypoint.emit(id, system.entrypoint.answer, STOP)
            assert content(await client.all()) == "Hello there!"

    run_async(main())


class Unanswered(MemoryBroker):
    """Loses the first answer."""

    num_lost = 0

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if not self.num_lost and delivery.subject.startswith(f"{INTERNAL_INBOX}."):
            self.num_lost += 1
        else:
            super().publish(source, delivery)


def test_a_shard_that_was_silent_when_asked_and_has_it_all_the_same(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is asked after it has the request by another id; what the first one says is nothing of it."""
    monkeypatch.setattr("bus.entrypoints.ASK_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with edge(card, broker=Unanswered()) as system:
            first, bus = system.entrypoint, system.gateway.bus
            first.is_silent = True
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(first)
            second = await successor(system, "e1")
            second.is_silent = True
            await bus.tell(LOAD.at(Role.ENTRYPOINT), structs.replace(first.load(), is_accepting=False))
            await second.until(lambda: f"{id}-1" in second.submitted)
            await second.emit(f"{id}-1", second.answer[:2])
            await first.emit(id, first.answer[:3])
            await first.until(lambda: id in first.cancelled)
            await second.emit(f"{id}-1", second.answer[2:], STOP)
            assert content(await client.all()) == "Hello there!"
            assert id not in second.submitted and not second.cancelled

    run_async(main())


class Losing(MemoryBroker):
    """Loses the first five questions; the broker may say that it was away meanwhile."""

    def __init__(self, *, is_away: bool) -> None:
        super().__init__()
        self._is_away, self.num_lost = is_away, 0

    def publish(self, source: MemoryWire, delivery: Delivery) -> None:
        if delivery.subject.endswith(".resend") and self.num_lost < 5:
            self.num_lost += 1
            self.away_s += 0.001 * self._is_away
            return
        super().publish(source, delivery)


@pytest.mark.parametrize("is_away", [True, False])
def test_a_shard_that_is_silent_is_lost_but_not_while_the_broker_is_away(
    run_async: Run, card: ModelCard, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    monkeypatch.setattr(requests, "SILENCE_S", 0.02)
    monkeypatch.setattr("bus.entrypoints.ASK_TIMEOUT_S", 0.02)
    monkeypatch.setattr("actors.recipe.actor.WATCH_S", 0.02)
    monkeypatch.setattr("actors.recipe.submission.MAX_MOVES", 0)

    async def main() -> None:
        broker = Losing(is_away=is_away)
        async with edge(card, broker=broker) as system:
            system.entrypoint.is_silent = True
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            if is_away:
                async with asyncio.timeout(10):
                    while broker.num_lost < 5:
                        await asyncio.sleep(0.01)
                await system.entrypoint.emit(id, system.entrypoint.answer, STOP)
                assert content(await client.all()) == "Hello there!"
            else:
                assert (await client.all())[-1]["error"]["code"] == "worker_lost"

    run_async(main())


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_shard_that_died_and_no_other_one_comes(
    run_async: Run, card: ModelCard, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.recipe.submission.PATIENCE_S", 0.2)

    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            if has_begun:
                await system.entrypoint.emit(id, [300])
                await client.next()
            await system.kill("e")
            bus = system.gateway.bus
            exited = ProcessExited(name="front", pid=bus.seams.pid, members=["entrypoint/e0"])
            await bus.tell(EXITED.all(), exited)
            assert (await client.all())[-1]["error"]["code"] == "worker_lost"
            await client.send(CHAT, STREAM)
            assert (await client.all())[0]["error"]["code"] == "no_responders"

    run_async(main())


def test_a_shard_that_fails_or_refuses(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            client = await system.client()
            await client.send(CHAT, STREAM)
            [id] = await submitted(system.entrypoint)
            await system.entrypoint.emit(id, [300])
            failure = Failure(code=Code.NO_REPLICA, message="no decode replica")
            await system.entrypoint.emit(id, [], Failed(failure=failure))
            assert (await client.all())[-1]["error"]["message"] == "no decode replica"
            system.entrypoint.refusal = Failure(code=Code.OVERLOADED, message="too many")
            await client.send(CHAT, STREAM)
            assert (await client.all())[0]["error"]["code"] == "overloaded"

    run_async(main())


def test_tokens_of_unknown_requests_are_cancelled(run_async: Run, card: ModelCard) -> None:
    async def main() -> None:
        async with silent(card) as system:
            entrypoint = system.entrypoint
            entrypoint.held["lost"] = ([], None)
            emitted = TokensEmitted(
                source="entrypoint/e0", request_ids=["lost"], epochs=[1], first_indexes=[5], counts=[1], tokens=[9]
            )
            await entrypoint.bus.tell(RECIPE_TOKENS.at("rc0"), emitted)
            await entrypoint.until(lambda: "lost" in entrypoint.cancelled)

    # Cancelled{} for it comes back to nobody: the fake has no recipe to tell.
    async def quiet() -> None:
        original = FakeEntrypoint.emit

        async def emit(self: FakeEntrypoint, request_id: str, *args: Any, **kwargs: Any) -> None:
            if request_id in self.submitted:
                await original(self, request_id, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeEntrypoint, "emit", emit)
            await main()

    run_async(quiet())
