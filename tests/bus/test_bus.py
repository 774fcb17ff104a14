"""Typed tell and ask, over both wires."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from bus.bus import DEADLINE_HEADER, Bus, BusError, Delivery
from bus.subjects import CANCEL, CLAIM, DISPATCH, MAX_MESSAGE_BYTES, STREAM, ping
from schemas.api import StreamBatch
from schemas.failure import Code, Failure
from schemas.handover import Claim, Claimed, ClaimRefused
from schemas.liveness import Ping, Pong
from schemas.message import Message
from schemas.request import Cancel, Taken
from tests.bus.conftest import Net
from tests.conftest import Run

PING = ping("tester")
PONG_FIELDS: dict[str, Any] = {"role": "tester", "incarnation": "i", "num_queued": 0}
PONG = Pong(**PONG_FIELDS, id="1")
CLAIM_MESSAGE = Claim(request_id="r", from_epoch=1, replica="decode-1")


async def answering(bus: Bus, subject: str, answer: Callable[[Delivery], Message | bytes | None]) -> list[Delivery]:
    """Answer everything that comes on a subject; returns the list of what has come."""
    seen: list[Delivery] = []
    tasks: set[asyncio.Future[Any]] = set()

    def on_delivery(delivery: Delivery) -> None:
        seen.append(delivery)
        message = answer(delivery)
        if message is not None and delivery.reply:
            work: Awaitable[None] = (
                bus.wire.publish(delivery.reply, message)
                if isinstance(message, bytes)
                else bus.answer(delivery.reply, message)
            )
            task = asyncio.ensure_future(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    await bus.wire.subscribe(subject, on_delivery)
    await bus.wire.flush()
    return seen


async def ask_fails(bus: Bus, *args: Any, timeout_s: float = 10.0) -> Failure:
    with pytest.raises(BusError) as caught:
        await bus.ask(*args, timeout_s=timeout_s)
    return caught.value.failure


def test_an_ask_is_answered_with_the_declared_type(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (asker, answerer):
            await answering(answerer, PING.any().name, lambda d: PONG)
            assert await asker.ask(PING.any(), Ping(), timeout_s=10) == PONG
            answers = iter([Claimed(epoch=2), ClaimRefused(reason="late")])
            await answering(answerer, CLAIM.at("e").name, lambda d: next(answers))
            assert await asker.ask(CLAIM.at("e"), CLAIM_MESSAGE, timeout_s=10) == Claimed(epoch=2)
            assert await asker.ask(CLAIM.at("e"), CLAIM_MESSAGE, timeout_s=10) == ClaimRefused(reason="late")

    run_async(main())


def test_many_asks_at_once_each_get_their_own_answer(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (asker, answerer):
            await answering(answerer, "shoal.tester.*.ping", lambda d: Pong(**PONG_FIELDS, id=d.subject))
            addresses = [PING.at(f"n{i}") for i in range(200)]
            pongs = await asyncio.gather(*(asker.ask(address, Ping(), timeout_s=10) for address in addresses))
            assert [pong.id for pong in pongs] == [address.name for address in addresses]

    run_async(main())


def test_an_ask_nobody_hears_fails_at_once(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(1) as (asker,):
            failure = await ask_fails(asker, PING.any(), Ping(), timeout_s=3600)
            assert failure.code == Code.NO_RESPONDERS
            assert PING.any().name in failure.message

    run_async(main())


def test_an_ask_without_an_answer_ends_at_its_deadline(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (asker, silent):
            seen = await answering(silent, PING.any().name, lambda d: None)
            failure = await ask_fails(asker, PING.any(), Ping(), timeout_s=0.05)
            assert failure.code == Code.DEADLINE_EXCEEDED
            await silent.answer(seen[0].reply, PONG)  # too late: ignored
            await silent.wire.flush()
            await asker.wire.flush()
            await answering(silent, PING.at("b").name, lambda d: Pong(**PONG_FIELDS, id="b"))
            assert (await asker.ask(PING.at("b"), Ping(), timeout_s=10)).id == "b"

    run_async(main())


def test_the_receivers_failure_is_the_askers_exception(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (asker, answerer):
            refusal = Failure(code=Code.CONTEXT_LENGTH, message="9 > 8", field="messages", retry_after_s=1.5)
            await answering(answerer, PING.any().name, lambda d: refusal)
            assert await ask_fails(asker, PING.any(), Ping()) == refusal

    run_async(main())


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Pong"])
def test_an_undecodable_answer_is_a_typed_failure(run_async: Run, net: Net, body: bytes) -> None:
    async def main() -> None:
        async with net.buses(2) as (asker, answerer):
            await answering(answerer, PING.any().name, lambda d: body)
            assert (await ask_fails(asker, PING.any(), Ping())).code == Code.INTERNAL

    run_async(main())


def test_a_message_over_the_size_contract_is_refused_before_it_is_sent(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (sender, receiver):
            seen = await answering(receiver, ">", lambda d: None)
            too_large = StreamBatch(stream_ids=[1], seqs=[0], items=[bytes(MAX_MESSAGE_BYTES)])
            with pytest.raises(BusError) as caught:
                await sender.tell(STREAM.at("g"), too_large)
            assert caught.value.code == Code.TOO_LARGE
            assert "by handle" in caught.value.failure.message
            large_ask = Cancel(request_id="x" * MAX_MESSAGE_BYTES)
            assert (await ask_fails(sender, CANCEL.at("e"), large_ask)).code == Code.TOO_LARGE
            await sender.wire.flush()
            await receiver.wire.flush()
            assert [d for d in seen if d.subject.startswith("shoal.")] == []

    run_async(main())


def test_the_size_contract_counts_an_asks_headers(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (sender, receiver):
            await answering(receiver, "shoal.entrypoint.*.cancel", lambda d: Failure(code=Code.NOT_FOUND, message=""))

            def cancel(num_bytes: int) -> Cancel:
                return Cancel(request_id="x" * num_bytes)

            # One tell at the limit exactly: the largest body without headers.
            with pytest.raises(BusError) as caught:
                await sender.tell(CANCEL.at("e"), cancel(MAX_MESSAGE_BYTES))
            overhead = int(caught.value.failure.message.split(" has ")[1].split()[0]) - MAX_MESSAGE_BYTES
            largest = MAX_MESSAGE_BYTES - overhead
            await sender.tell(CANCEL.at("e"), cancel(largest))
            assert (await ask_fails(sender, CANCEL.at("e"), cancel(largest))).code == Code.TOO_LARGE
            assert (await ask_fails(sender, CANCEL.at("e"), cancel(largest - 256))).code == Code.NOT_FOUND

    run_async(main())


def test_an_answer_over_the_size_contract_becomes_a_failure(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (asker, answerer):
            huge = Failure(code=Code.INTERNAL, message="x" * asker.wire.max_payload)
            await answering(answerer, PING.any().name, lambda d: huge)
            failure = await ask_fails(asker, PING.any(), Ping())
            assert failure.code == Code.TOO_LARGE

    run_async(main())


def test_asks_carry_deadline_and_trace_context_and_tells_carry_no_headers(run_async: Run, net: Net) -> None:
    tracer = TracerProvider().get_tracer("test")

    async def main() -> None:
        async with net.buses(2) as (asker, answerer):
            seen = await answering(answerer, PING.any().name, lambda d: PONG)
            before_ns = asker.seams.clock_ns()
            with tracer.start_as_current_span("outer") as span:
                await asker.ask(PING.any(), Ping(), timeout_s=10)
                await asker.tell(PING.any(), Ping())
            await asker.wire.flush()
            await answerer.wire.flush()
            asked, told = seen
            assert told.headers is None
            assert told.reply == ""
            assert asked.headers is not None
            assert f"{span.get_span_context().trace_id:032x}" in asked.headers["traceparent"]
            assert 9e9 < int(asked.headers[DEADLINE_HEADER]) - before_ns < 11e9 + 5e9
            assert trace.get_current_span() is trace.INVALID_SPAN

    run_async(main())


def test_receipts_come_each_time_and_missing_comes_once(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (sender, receiver):
            fates: list[bool] = []
            batch = StreamBatch(stream_ids=[1], seqs=[0], items=[b"x"])
            await answering(receiver, STREAM.at("here").name, lambda d: Taken())

            async def settle() -> None:
                for bus in (sender, receiver, sender):
                    await bus.wire.flush()

            for _ in range(3):
                await sender.tell(STREAM.at("here"), batch, on_fate=fates.append)
            await settle()
            assert fates == [True] * 3
            sender.forget(STREAM.at("here").name, fates.append)
            fates.clear()
            for _ in range(3):
                await sender.tell(STREAM.at("gone"), batch, on_fate=fates.append)
            await settle()
            assert fates.count(False) == 1
            assert fates.count(True) == 0

    run_async(main())


def test_forget_ends_the_watch(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(1) as (sender,):
            fates: list[bool] = []
            on_fate = fates.append
            await sender.publish("_INBOX.nobody", b"", on_fate=on_fate)
            sender.forget("_INBOX.nobody", on_fate)
            sender.forget("_INBOX.nobody", on_fate)
            await sender.wire.flush()
            await sender.wire.flush()
            assert fates == []
            await sender.publish("_INBOX.nobody", b"", on_fate=on_fate)
            await sender.wire.flush()
            await sender.wire.flush()
            assert fates == [False]

    run_async(main())


def test_nothing_is_kept_of_asks_that_are_over(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.buses(2) as (asker, answerer):
            await answering(answerer, PING.at("a").name, lambda d: PONG)
            await answering(answerer, DISPATCH.at("silent").name, lambda d: None)
            kept = len(asker._waiting)
            await asker.ask(PING.at("a"), Ping(), timeout_s=10)
            await ask_fails(asker, PING.at("nobody"), Ping())
            asking = asyncio.ensure_future(asker.ask(PING.at("a"), Ping(), timeout_s=10))
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert len(asker._waiting) == kept

    run_async(main())
