"""Streams: order, gaps, duplicates, ends, stalls, bounds; and what one message carries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bus.bulk import INLINE_BYTES, MemoryBulk, MemoryHub
from bus.bus import Bus, BusError, Delivery, decoder, fail
from bus.memory import MemoryBroker, MemoryWire
from bus.stream import InStream, Item, StreamReader, StreamWriter
from bus.subjects import STREAM
from schemas.api import StreamBatch
from schemas.failure import Code
from schemas.request import Taken
from tests.conftest import Run

TIMEOUT_S = 10.0


def batch(*items: tuple[int, int, bytes], last: tuple[int, ...] = (), **fields: Any) -> StreamBatch:
    """A batch of (stream id, number, body)."""
    return StreamBatch(
        stream_ids=[i for i, _, _ in items],
        seqs=[seq for _, seq, _ in items],
        items=[body for _, _, body in items],
        last=list(last),
        **fields,
    )


def make_reader(**settings: Any) -> StreamReader:
    return StreamReader(MemoryBulk(MemoryHub()), **settings)


async def read(stream: InStream) -> list[Item]:
    """Everything until the end."""
    found: list[Item] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for items in stream:
            assert items, "woken for nothing"
            found += items
    return found


async def read_failing(stream: InStream) -> tuple[list[bytes], Code]:
    """What came before the failure, and its code."""
    found: list[bytes] = []
    with pytest.raises(BusError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            async for items in stream:
                found += [item.body for item in items]
    return found, caught.value.code


def test_items_reach_their_streams_in_order_and_all_at_once(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        one, two = reader.open(1, stall_s=60), reader.open(2, stall_s=60)
        reader.feed(batch((1, 0, b"a"), (2, 0, b"x"), (1, 1, b"b")))
        assert await anext(one) == [Item(b"a", False, 200), Item(b"b", False, 200)]
        reader.feed(batch((1, 2, b"c"), (2, 1, b"y"), last=(0, 1), statuses=[(1, 503)]))
        assert await read(one) == [Item(b"c", True, 200)]
        assert await read(two) == [Item(b"x", False, 200), Item(b"y", True, 503)]
        with pytest.raises(StopAsyncIteration):
            await anext(one)

    run_async(main())


def test_a_reader_that_waits_is_woken(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        reading = asyncio.create_task(read(reader.open(1, stall_s=60)))
        for seq in range(5):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reader.feed(batch((1, seq, b"%d" % seq), last=(0,) if seq == 4 else ()))
        assert [item.body for item in await reading] == [b"0", b"1", b"2", b"3", b"4"]

    run_async(main())


def test_duplicates_and_strangers_are_dropped(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        stream = reader.open(1, stall_s=60)
        reader.feed(batch((1, 0, b"a"), (1, 0, b"a"), (9, 5, b"?"), (1, 1, b"b"), (1, 0, b"a")))
        reader.feed(batch((1, 1, b"b"), (1, 2, b"c"), (1, 3, b"after the end"), last=(1,)))
        assert [item.body for item in await read(stream)] == [b"a", b"b", b"c"]

    run_async(main())


def test_a_gap_ends_the_stream_after_what_came_before_it(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        stream, other = reader.open(1, stall_s=60), reader.open(2, stall_s=60)
        reader.feed(batch((1, 0, b"a"), (1, 2, b"c"), (2, 0, b"x"), (1, 1, b"b"), last=(2,)))
        assert await read_failing(stream) == ([b"a"], Code.INTERNAL)
        assert [item.body for item in await read(other)] == [b"x"]

    run_async(main())


def test_a_lost_first_item_is_a_gap(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        stream = reader.open(1, stall_s=60)
        reader.feed(batch((1, 1, b"b"), last=(0,)))
        assert await read_failing(stream) == ([], Code.INTERNAL)

    run_async(main())


def test_a_stall_ends_the_stream_and_items_put_it_off(run_async: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        reader = make_reader()
        stalled, lively = reader.open(1, stall_s=0.05), reader.open(2, stall_s=0.2)
        start = loop.time()
        assert await read_failing(stalled) == ([], Code.DEADLINE_EXCEEDED)
        reader.feed(batch((2, 0, b"a")))
        fed = loop.time()
        assert await read_failing(lively) == ([b"a"], Code.DEADLINE_EXCEEDED)
        assert start + 0.05 <= fed
        assert fed + 0.2 <= loop.time()

    run_async(main())


def test_what_piles_up_for_a_consumer_is_bounded(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader(max_buffered_bytes=1000)
        stream = reader.open(1, stall_s=60)
        for seq in range(11):
            reader.feed(batch((1, seq, bytes(100))))
        assert await read_failing(stream) == ([], Code.OVERLOADED)
        large = reader.open(2, stall_s=60)
        reader.feed(batch((2, 0, bytes(5000)), last=(0,)))
        assert len((await read(large))[0].body) == 5000, "a single item may be larger than the bound"

    run_async(main())


def test_a_closed_stream_takes_nothing_and_its_id_is_free(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        stream = reader.open(1, stall_s=60)
        with pytest.raises(ValueError, match="open already"):
            reader.open(1, stall_s=60)
        waiting = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.close()
        stream.close()
        assert await waiting == []
        reader.feed(batch((1, 0, b"late")))
        again = reader.open(1, stall_s=60)
        stream.close()  # must not close its successor
        reader.feed(batch((1, 0, b"new"), last=(0,)))
        assert [item.body for item in await read(again)] == [b"new"]
        assert reader._streams == {}

    run_async(main())


def test_what_is_put_after_the_end_is_dropped(run_async: Run) -> None:
    async def main() -> None:
        stream = make_reader().open(1, stall_s=60)
        stream.put(b"a", False, 200)
        stream.put(b"end", True, 200)
        stream.put(b"", False, 200)
        assert [(item.body, item.is_last) for item in await read(stream)] == [(b"a", False), (b"end", True)]

    run_async(main())


def test_a_stream_can_be_failed_from_outside(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        stream = reader.open(1, stall_s=60)
        reader.feed(batch((1, 0, b"a")))
        stream.fail(fail(Code.WORKER_LOST, "the recipe is gone"))
        assert await read_failing(stream) == ([b"a"], Code.WORKER_LOST)
        ended = reader.open(2, stall_s=60)
        reader.feed(batch((2, 0, b"a"), last=(0,)))
        ended.fail(fail(Code.WORKER_LOST, "the recipe is gone"))  # too late: it has ended well
        assert [item.body for item in await read(ended)] == [b"a"]

    run_async(main())


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[StreamWriter, StreamReader, list[StreamBatch], list[tuple[str, bool]]]]:
    """A writer, and a reader at gateway g1; the batches it got; the fates the writer heard of."""
    broker, hub = MemoryBroker(), MemoryHub()
    buses = [Bus(MemoryWire(broker)) for _ in range(2)]
    bulks = [MemoryBulk(hub) for _ in range(2)]
    fates: list[tuple[str, bool]] = []
    batches: list[StreamBatch] = []
    receipts: set[asyncio.Task[None]] = set()
    writer = StreamWriter(buses[0], bulks[0], lambda name, is_taken: fates.append((name, is_taken)))
    reader = StreamReader(bulks[1])

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
            assert fates == [(STREAM.at("g1").name, True)] * 3

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
            assert len(fates) == 20, "a window that counts receipts would stay shut"

    run_async(main())


def test_what_may_not_be_sent_yet_keeps_gathering(run_async: Run) -> None:
    async def main() -> None:
        async with pair() as (writer, reader, batches, _):
            stream, name = reader.open(1, stall_s=60), STREAM.at("g1").name
            out = writer.open(STREAM.at("g1"), 1)
            out.put(b"a")
            sent: list[str] = []
            await writer.flush(lambda destination: destination != name, sent.append)
            assert sent == []
            out.put(b"b", is_last=True)
            await writer.flush(lambda destination: destination == name, sent.append)
            assert sent == [name]
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
            assert fates == [(STREAM.at("g2").name, False)]
            out.put(b"b")
            sent: list[str] = []
            await writer.flush(on_send=sent.append)
            assert sent == []
            assert writer._gathered == {}
            writer.open(STREAM.at("g2"), 2).put(b"c")  # it may come back
            await writer.flush(on_send=sent.append)
            assert len(sent) == 1

    run_async(main())
