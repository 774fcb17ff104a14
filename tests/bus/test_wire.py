"""What every wire must do, over both."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from bus.bus import BusError, Delivery, Wire, header_bytes
from schemas.failure import Code
from tests.bus.conftest import Net
from tests.conftest import Run


class Heard:
    """Collects deliveries; `until(n)` waits for the n-th."""

    def __init__(self) -> None:
        self.all: list[Delivery] = []
        self._news = asyncio.Event()

    def __call__(self, delivery: Delivery) -> None:
        self.all.append(delivery)
        self._news.set()

    async def until(self, num: int) -> list[Delivery]:
        async with asyncio.timeout(10):
            while len(self.all) < num:
                self._news.clear()
                await self._news.wait()
        return self.all

    @property
    def bodies(self) -> list[bytes]:
        return [delivery.body for delivery in self.all]


async def settle(source: Wire, *listeners: Wire) -> None:
    """Return when all that `source` published before has reached the listeners."""
    await source.flush()
    for listener in listeners:
        await listener.flush()


@pytest.mark.parametrize(
    ("pattern", "hits", "misses"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.c", "A.b"]),
        ("a.*", ["a.b", "a.c"], ["a", "a.b.c", "b.a"]),
        ("*.b", ["a.b", "c.b"], ["b", "a.b.c"]),
        ("a.*.c", ["a.b.c"], ["a.c", "a.b.b.c"]),
        ("a.>", ["a.b", "a.b.c.d"], ["a", "b.a"]),
        ("*.*", ["a.b"], ["a", "a.b.c"]),
        (">", ["a", "a.b.c"], []),
        ("a.*.>", ["a.b.c", "a.b.c.d"], ["a.b", "a"]),
    ],
)
def test_wildcards(run_async: Run, net: Net, pattern: str, hits: list[str], misses: list[str]) -> None:
    async def main() -> None:
        async with net.wires(2) as (source, listener):
            heard = Heard()
            await listener.subscribe(f"wild.{pattern}", heard)
            await listener.flush()
            for subject in misses + hits:
                await source.publish(f"wild.{subject}", subject.encode())
            await settle(source, listener)
            assert [d.subject for d in await heard.until(len(hits))] == [f"wild.{subject}" for subject in hits]

    run_async(main())


def test_everyone_without_a_queue_and_one_of_each_queue_hears(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(4) as (source, *listeners):
            alone = [Heard() for _ in listeners]
            red, blue = [Heard() for _ in listeners], [Heard() for _ in listeners]
            for i, wire in enumerate(listeners):
                await wire.subscribe("q.x", alone[i])
                await wire.subscribe("q.*", red[i], queue="red")
                await wire.subscribe("q.x", blue[i], queue="blue")
                await wire.flush()
            for i in range(60):
                await source.publish("q.x", b"%d" % i)
            await settle(source, *listeners)
            everything = [b"%d" % i for i in range(60)]
            assert all(heard.bodies == everything for heard in alone)
            for group in (red, blue):
                assert sorted((b for heard in group for b in heard.bodies), key=int) == everything
                assert all(heard.all for heard in group), "one member got nothing of 60"

    run_async(main())


def test_a_publish_with_reply_to_nobody_is_answered_as_missing(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(2) as (source, other):
            heard, elsewhere = Heard(), Heard()
            await source.subscribe(f"{source.inbox}.*", heard)
            await other.subscribe("gone.reply", elsewhere)
            await other.flush()
            await source.publish("gone.x", b"hello", reply=f"{source.inbox}.1")
            await source.publish("gone.x", b"no reply wanted")
            # Only who published is told, and only if it listens on the reply itself.
            await source.publish("gone.x", b"hello", reply="gone.reply")
            await settle(source, other)
            assert heard.all == [Delivery(f"{source.inbox}.1", b"", "", None, is_missing=True)]
            assert elsewhere.all == []

    run_async(main())


def test_a_message_somebody_hears_is_not_missing(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(2) as (source, listener):
            answers, heard = Heard(), Heard()
            await source.subscribe(f"{source.inbox}.*", answers)
            await listener.subscribe("here.*", heard, queue="q")
            await listener.flush()
            await source.publish("here.x", b"1", reply=f"{source.inbox}.1", headers={"A": "b"})
            await settle(source, listener)
            assert heard.all == [Delivery("here.x", b"1", f"{source.inbox}.1", {"A": "b"})]
            assert answers.all == []

    run_async(main())


def test_deliveries_from_one_publisher_arrive_in_order(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(2) as (source, listener):
            heard = Heard()
            await listener.subscribe("order.>", heard)
            await listener.flush()
            for i in range(3000):
                await source.publish(f"order.{i % 7}", b"%d" % i)
            assert [d.body for d in await heard.until(3000)] == [b"%d" % i for i in range(3000)]

    run_async(main())


@pytest.mark.parametrize("error", [ValueError("bug"), asyncio.CancelledError()])
def test_a_listener_that_raises_still_hears_the_next(
    run_async: Run, net: Net, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with net.wires(2) as (source, listener):
            heard = Heard()

            def on_delivery(delivery: Delivery) -> None:
                heard(delivery)
                raise error

            await listener.subscribe("raise.x", on_delivery)
            await listener.flush()
            await source.publish("raise.x", b"1")
            await source.publish("raise.x", b"2")
            assert len(await heard.until(2)) == 2

    run_async(main())
    assert "must only enqueue" in caplog.text


def test_the_limit_counts_headers_and_nothing_is_sent_beyond_it(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(2) as (source, listener):
            heard = Heard()
            await listener.subscribe("size.x", heard)
            await listener.flush()
            headers = {"Key": "välue"}
            limit = source.max_payload
            fits = bytes(limit - header_bytes(headers))
            await source.publish("size.x", fits, headers=headers)
            for body, extra in ((fits + b"!", headers), (bytes(limit + 1), None)):
                with pytest.raises(BusError) as caught:
                    await source.publish("size.x", body, headers=extra)
                assert caught.value.code == Code.TOO_LARGE
            await source.publish("size.x", bytes(limit))
            sizes = [(len(d.body), d.headers) for d in await heard.until(2)]
            assert sizes == [(len(fits), headers), (limit, None)]

    run_async(main())


def test_what_was_sent_before_unsubscribing_arrives_and_nothing_after(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(2) as (source, listener):
            heard = Heard()
            unsubscribe = await listener.subscribe("stop.x", heard)
            await listener.flush()
            await source.publish("stop.x", b"before")
            await source.flush()
            await unsubscribe()
            assert heard.bodies == [b"before"]
            await unsubscribe()
            await source.publish("stop.x", b"after")
            await settle(source, listener)
            assert heard.bodies == [b"before"]
            own = Heard()
            unsubscribe = await listener.subscribe("stop.y", own)
            await listener.publish("stop.y", b"under way")
            await unsubscribe()
            assert own.bodies == [b"under way"]

    run_async(main())


def test_a_wire_hears_itself(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(1) as (wire,):
            heard = Heard()
            await wire.subscribe("self.x", heard)
            await wire.publish("self.x", b"\x00\xff\r\n")
            assert (await heard.until(1))[0].body == b"\x00\xff\r\n"

    run_async(main())


def test_a_listener_runs_outside_the_publishers_context(run_async: Run, net: Net) -> None:
    ambient: ContextVar[str] = ContextVar("ambient", default="nothing")

    async def main() -> None:
        async with net.wires(2) as (source, listener):
            seen: list[str] = []
            heard = Heard()

            def on_delivery(delivery: Delivery) -> None:
                seen.append(ambient.get())
                heard(delivery)

            await listener.subscribe("context.x", on_delivery)
            await listener.flush()
            ambient.set("the publisher's")
            await source.publish("context.x", b"")
            await heard.until(1)
            assert seen == ["nothing"]

    run_async(main())


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0\r\n", "a\tb"])
def test_a_bad_subject_is_refused(run_async: Run, net: Net, subject: str) -> None:
    async def main() -> None:
        async with net.wires(1) as (wire,):
            calls: list[Any] = [wire.publish(subject, b""), wire.subscribe(subject, Heard())]
            if subject:
                calls.append(wire.publish("good", b"", reply=subject))
            for call in calls:
                with pytest.raises(BusError) as caught:
                    await call
                assert caught.value.code == Code.BAD_REQUEST

    run_async(main())


def test_a_line_the_broker_would_not_take_is_refused_unsent(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(2) as (wire, listener):
            heard = Heard()
            await listener.subscribe("long.>", heard)
            await listener.flush()
            for subject, reply in (("long." + "ä" * 1998, ""), ("long.x", "r" * 3995)):
                with pytest.raises(BusError) as caught:
                    await wire.publish(subject, b"", reply=reply)
                assert caught.value.code == Code.BAD_REQUEST
            await wire.publish("long." + "a" * 1995, b"fits", reply="r" * 2000, headers={"A": "b"})
            await settle(wire, listener)
            assert heard.bodies == [b"fits"]

    run_async(main())


@pytest.mark.parametrize("headers", [{"a b": "c"}, {"": "c"}, {"a": "c\r\nd: e"}, {"a\n": "c"}, {"ä": "c"}])
def test_a_bad_header_is_refused(run_async: Run, net: Net, headers: dict[str, str]) -> None:
    async def main() -> None:
        async with net.wires(1) as (wire,):
            with pytest.raises(BusError) as caught:
                await wire.publish("good", b"", headers=headers)
            assert caught.value.code == Code.BAD_REQUEST

    run_async(main())


def test_a_closed_wire_refuses_and_leaves_nobody_listening(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(2) as (wire, other):
            answers = Heard()
            await wire.subscribe("closed.x", Heard())
            await wire.flush()
            await other.subscribe(f"{other.inbox}.*", answers)
            await wire.close()
            await wire.close()
            calls: list[Any] = [wire.publish("closed.x", b""), wire.subscribe("closed.x", Heard())]
            for call in calls:
                with pytest.raises(BusError) as caught:
                    await call
                assert caught.value.code == Code.SHUTTING_DOWN
            async with asyncio.timeout(10):  # the broker may hear of the closed socket a little later
                while not any(d.is_missing for d in answers.all):
                    await other.publish("closed.x", b"", reply=f"{other.inbox}.1")
                    await other.flush()

    run_async(main())


def test_every_wire_has_an_inbox_of_its_own(run_async: Run, net: Net) -> None:
    async def main() -> None:
        async with net.wires(3) as wires:
            assert len({wire.inbox for wire in wires}) == 3
            assert all(wire.inbox.startswith("_SHOAL.") for wire in wires)

    run_async(main())
