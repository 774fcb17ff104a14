"""Streamed replies on their way out: what one message carries, and what becomes of a destination."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus import writer as writer_module
from bus.bulk import INLINE_BYTES, MemoryBulk, MemoryHub
from bus.bus import Bus, Delivery, decoder
from bus.memory import MemoryBroker, MemoryWire
from bus.stream import Item, StreamReader
from bus.subjects import STREAM
from bus.writer import KEPT_BYTES, KEPT_ITEMS, StreamWriter
from schemas.api import StreamBatch
from schemas.failure import Code
from schemas.request import Taken
from tests.bus.test_stream import read, read_failing
from tests.conftest import Run

G1, G2 = (STREAM.at(id).name for id in ("g1", "g2"))


class Fates:
    """Windows that are shut where the test says so, and note everything."""

    def __init__(self) -> None:
        self.shut: set[str] = set()
        self.was_sent: list[str] = []
        self.was_taken: list[str] = []
        self.was_dropped: list[str] = []
        self.is_gone: list[str] = []
        self.num_receipts = 0

    def may_send(self, destination: str, now_s: float) -> bool:
        return destination not in self.shut

    def sent(self, destination: str, now_s: float) -> None:
        self.was_sent.append(destination)

    def taken(self, destination: str, now_s: float) -> None:
        self.was_taken.append(destination)

    def drop(self, destination: str) -> None:
        self.was_dropped.append(destination)

    def on_receipt(self) -> None:
        self.num_receipts += 1


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[StreamWriter, StreamReader, list[StreamBatch], Fates]]:
    """A writer, and a reader at gateway g1; the batches it got; the fates the writer heard of."""
    broker, hub = MemoryBroker(), MemoryHub()
    buses = [Bus(MemoryWire(broker)) for _ in range(2)]
    bulks = [MemoryBulk(hub) for _ in range(2)]
    fates = Fates()
    batches: list[StreamBatch] = []
    receipts: set[asyncio.Task[None]] = set()
    writer = StreamWriter(buses[0], bulks[0], fates, fates.on_receipt, fates.is_gone.append)
    reader = StreamReader(bulks[1], lambda _: None)

    def on_delivery(delivery: Delivery) -> None:
        batches.append(decoder(StreamBatch).decode(delivery.body))
        reader.feed(batches[-1])
        receipts.add(asyncio.create_task(buses[1].answer(delivery.reply, Taken())))

    for bus, bulk in zip(buses, bulks, strict=True):
        await bus.open()
        await bulk.start()
    await buses[1].wire.subscribe(STREAM.at("g1").name, on_delivery)
    yield writer, reader, batches, fates
    for bus, bulk in zip(buses, bulks, strict=True):
        await bus.close()
        await bulk.close()


def test_one_flush_is_one_message_per_destination(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, batches, fates):
            ids = range(20)
            streams = [reader.open(i, stall_s=60) for i in ids]
            out = [writer.open(STREAM.at("g1"), i) for i in ids]
            for step in range(3):
                for stream in out:
                    stream.put(b"%d" % step, is_last=step == 2, status=499 if step == 2 else 200)
                await writer.flush()
            for stream in streams:
                expected = [Item(b"0", False, 200), Item(b"1", False, 200), Item(b"2", True, 499)]
                assert await read(stream) == expected
            assert [len(b.items) for b in batches] == [20, 20, 20]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert fates.was_sent == fates.was_taken == [G1] * 3
            assert fates.num_receipts == 3

    run_async(main())


def test_receipts_come_even_after_the_last_stream_ended(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, _, fates):
            for i in range(20):
                stream = reader.open(i, stall_s=60)
                writer.open(STREAM.at("g1"), i).put(b"all of it", is_last=True)
                await writer.flush()
                await writer.flush()
                assert len(await read(stream)) == 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(fates.was_taken) == 20, "a window that counts receipts would stay shut"

    run_async(main())


def test_what_may_not_be_sent_yet_keeps_gathering(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, batches, fates):
            stream = reader.open(1, stall_s=60)
            out = writer.open(STREAM.at("g1"), 1)
            out.put(b"a")
            fates.shut.add(G1)
            await writer.flush()
            assert fates.was_sent == []
            out.put(b"b", is_last=True)
            fates.shut.clear()
            await writer.flush()
            assert fates.was_sent == [G1]
            assert [item.body for item in await read(stream)] == [b"a", b"b"]
            assert len(batches) == 1

    run_async(main())


def test_batches_are_split_at_the_size_contract_and_large_items_go_by_handle(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, batches, _):
            stream = reader.open(7, stall_s=60)
            out = writer.open(STREAM.at("g1"), 7)
            sizes = [100_000] * 5 + [INLINE_BYTES, INLINE_BYTES + 1, 3_000_000, 0] + [1] * 3000
            bodies = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
            for i, body in enumerate(bodies):
                out.put(body, is_last=i == len(bodies) - 1)
            out.put(b"after the end")
            await writer.flush()
            found = await read(stream)
            assert [item.body for item in found] == bodies
            assert [item.is_last for item in found] == [False] * (len(bodies) - 1) + [True]
            assert len(batches) >= 4
            assert writer.bulk.num_offers == 0

    run_async(main())


def test_a_large_item_that_cannot_be_pulled_fails_the_stream(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, _, _):
            stream = reader.open(7, stall_s=60)
            out = writer.open(STREAM.at("g1"), 7)
            out.put(bytes(INLINE_BYTES + 1), is_last=True)
            await writer.flush()
            await writer.bulk.close()
            assert await read_failing(stream) == ([], Code.TRANSFER_FAILED)

    run_async(main())


def test_a_destination_that_is_gone_is_reported_once(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, _, _, fates):
            out = writer.open(STREAM.at("g2"), 1)
            out.put(b"a")
            await writer.flush()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert fates.is_gone == fates.was_dropped == [G2]
            out.put(b"b")
            await writer.flush()
            assert fates.was_sent == [G2]
            assert writer._gathered == {}
            writer.open(STREAM.at("g2"), 2).put(b"c")  # it may come back
            await writer.flush()
            assert fates.was_sent == [G2, G2]

    run_async(main())


def test_nothing_is_kept_of_a_destination_without_streams(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, _, fates):
            streams = [reader.open(i, stall_s=60) for i in range(2)]
            first, second = (writer.open(STREAM.at("g1"), i) for i in range(2))
            first.put(b"a", is_last=True)
            await writer.flush()
            writer.prune()
            assert fates.was_dropped == [], "one is open"
            second.put(b"b")
            second.close()
            second.close()
            writer.prune()
            assert fates.was_dropped == [], "its item is not sent yet"
            await writer.flush()
            writer.prune()
            assert fates.was_dropped == [G1]
            assert writer._gathered == {} == writer._bus._watched
            writer.open(STREAM.at("g1"), 1)
            streams[1].close()
            assert [item.body for item in await read(streams[0])] == [b"a"]

    run_async(main())


def test_what_was_lost_is_sent_again(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, batches, _):
            out = writer.open(STREAM.at("g1"), 1)
            sent = [Item(b"%d" % i, False, 200) for i in range(5)]
            sent += [Item(bytes(INLINE_BYTES + 1), False, 200), Item(b"end", True, 503, 1.5)]
            for item in sent:
                out.put(item.body, is_last=item.is_last, status=item.status, retry_after_s=item.retry_after_s)
            await writer.flush()  # to nobody: the reader opens its stream too late
            await asyncio.sleep(0)
            stream = reader.open(1, stall_s=60)
            assert writer.repair(STREAM.at("g1"), 1, None) == 7
            await writer.flush()
            assert len(batches) == 1
            assert writer.repair(STREAM.at("g1"), 1, 3) == 7
            await writer.flush()
            await asyncio.sleep(0)
            assert stream.next_seq == 0, "a repair from 3 does not help a reader at 0"
            for _ in range(2):  # the second one finds the items waiting to be sent
                assert writer.repair(STREAM.at("g1"), 1, 0) == 7
            await writer.flush()
            assert await read(stream) == sent
            assert [len(b.items) for b in batches] == [7, 4, 7]
            assert writer.repair(STREAM.at("g1"), 1, 7) == 7

    run_async(main())


def test_only_the_last_items_are_kept(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, _, _, _):
            address = STREAM.at("g1")
            many, large, one = (writer.open(address, i) for i in range(3))
            for _ in range(KEPT_ITEMS + 1):
                many.put(b"x")
            for _ in range(5):
                large.put(bytes(KEPT_BYTES // 4))
            one.put(bytes(KEPT_BYTES // 4 * 3))
            await writer.flush()
            assert [writer.repair(address, 0, seq) for seq in (0, 1)] == [-1, KEPT_ITEMS + 1]
            await writer.flush()
            assert [writer.repair(address, 1, seq) for seq in (0, 1)] == [-1, 5]
            assert writer.repair(address, 2, 0) == 1

    run_async(main())


def test_nothing_is_kept_of_streams_that_ended_long_ago_or_have_no_reader(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with pair() as (writer, _, _, _):
            here, away = STREAM.at("g1"), STREAM.at("g2")
            ended, closed, running = (writer.open(here, i) for i in range(3))
            ended.put(b"a", is_last=True)
            closed.put(b"a")
            closed.close()
            running.put(b"a")
            writer.open(away, 0).put(b"a")
            assert writer.repair(away, 0, None) == 1
            await writer.flush()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writer.prune()
            assert [writer.repair(here, i, None) for i in range(3)] == [1, -1, 1]
            assert writer.repair(away, 0, None) == -1
            monkeypatch.setattr(writer_module, "KEPT_S", -math.inf)
            writer.prune()
            assert [writer.repair(here, i, None) for i in range(3)] == [-1, -1, 1]
            running.put(b"b", is_last=True)
            await writer.flush()
            writer.prune()
            assert writer._kept == {} == writer._gathered

    run_async(main())
