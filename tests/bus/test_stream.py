"""Streams as they are read: order, gaps, duplicates, ends, stalls, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bus.bulk import MemoryBulk, MemoryHub
from bus.bus import BusError, fail
from bus.stream import InStream, Item, StreamReader
from schemas.api import StreamBatch
from schemas.failure import Code
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


def make_reader(on_too_slow: Callable[[InStream], None] = lambda _: None) -> StreamReader:
    return StreamReader(MemoryBulk(MemoryHub()), on_too_slow)


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


def test_what_is_behind_a_gap_is_dropped_and_told(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        stream, other = reader.open(1, stall_s=60), reader.open(2, stall_s=60)
        batches = batch((1, 0, b"a"), (1, 2, b"?"), (2, 0, b"x"), (1, 3, b"?"), last=(2,))
        assert reader.feed(batches) == [stream]
        assert [item.body for item in await read(other)] == [b"x"]
        assert stream.next_seq == 1
        assert reader.feed(batch((1, 0, b"a"), (1, 1, b"b"), (1, 2, b"c"), last=(2,))) == []
        assert [item.body for item in await read(stream)] == [b"a", b"b", b"c"]

    run_async(main())


def test_a_lost_first_item_is_a_gap(run_async: Run) -> None:
    async def main() -> None:
        reader = make_reader()
        stream = reader.open(1, stall_s=60)
        assert reader.feed(batch((1, 1, b"b"), last=(0,))) == [stream]
        reader.feed(batch((1, 0, b"a"), (1, 1, b"b"), last=(1,)))
        assert [item.body for item in await read(stream)] == [b"a", b"b"]

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
        assert start + 0.049 <= fed  # uvloop's clock is in whole milliseconds
        assert fed + 0.199 <= loop.time()

    run_async(main())


def test_what_piles_up_for_a_consumer_is_bounded(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.stream.MAX_BUFFERED_BYTES", 1000)

    async def main() -> None:
        slow: list[InStream] = []
        reader = make_reader(slow.append)
        stream = reader.open(1, stall_s=60)
        for seq in range(50):
            reader.feed(batch((1, seq, bytes(100))))
            assert stream.num_bytes <= 1000
        assert slow == [stream]
        assert await read_failing(stream) == ([], Code.CLIENT_TOO_SLOW)
        large = reader.open(2, stall_s=60)
        reader.feed(batch((2, 0, bytes(5000)), last=(0,)))
        assert len((await read(large))[0].body) == 5000, "a single item may be larger than the bound"
        lively = reader.open(3, stall_s=60)
        reading = asyncio.create_task(read(lively))
        await asyncio.sleep(0)
        reader.feed(batch(*((3, seq, bytes(500)) for seq in range(9)), last=(8,)))
        assert len(await reading) == 9 and slow == [stream], "who waits for items is not slow, however many come"

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
