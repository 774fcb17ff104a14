"""Streamed replies: numbered items and one terminal item, many streams of a destination in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bus.bulk import INLINE_BYTES, LEASE_S, Bulk
from bus.bus import Bus, BusError, fail
from bus.subjects import MAX_MESSAGE_BYTES, Address
from schemas.api import StreamBatch
from schemas.bulk import Handle
from schemas.failure import Code

BATCH_BYTES = MAX_MESSAGE_BYTES - 1024
"""Items of one batch, with what surrounds them. The rest of a message is the batch's own frame."""

ITEM_BYTES = 32
"""What surrounds an item at most: stream id, number, length, place in `last` and `statuses`."""

HANDLE_BYTES = 256

MAX_BUFFERED_BYTES = 4 * 1024 * 1024
"""What one stream may hold for a consumer that does not come for it."""

PULL_TIMEOUT_S = 10.0


class Item(NamedTuple):
    """One item of a stream. `status` is an HTTP status; after `is_last` nothing follows."""

    body: bytes
    is_last: bool
    status: int


class _Gathered:
    """Items on their way to one destination, struct of arrays. Sent as few messages as the size contract allows."""

    __slots__ = (
        "address",
        "is_gone",
        "items",
        "large",
        "last",
        "num_bytes",
        "on_fate",
        "seqs",
        "statuses",
        "streams",
    )

    def __init__(self, address: Address[StreamBatch, Any], on_fate: Callable[[bool], None]) -> None:
        self.address = address
        self.on_fate = on_fate
        self.is_gone = False
        self.clear()

    def clear(self) -> None:
        self.streams: list[int] = []
        self.seqs: list[int] = []
        self.items: list[bytes] = []
        self.last: list[int] = []
        self.statuses: list[tuple[int, int]] = []
        self.large: list[tuple[int, Handle]] = []
        self.num_bytes = 0

    def batches(self) -> Iterator[StreamBatch]:
        """All items, in order, in batches that fit in a message."""
        if self.num_bytes <= BATCH_BYTES:
            yield StreamBatch(
                stream_ids=self.streams,
                seqs=self.seqs,
                items=self.items,
                last=self.last,
                statuses=self.statuses,
                large=self.large,
            )
            return
        large = dict(self.large)
        start, num_bytes = 0, 0
        for i, item in enumerate(self.items):
            item_bytes = len(item) + ITEM_BYTES + (HANDLE_BYTES if i in large else 0)
            if num_bytes + item_bytes > BATCH_BYTES:
                yield self._slice(start, i)
                start, num_bytes = i, 0
            num_bytes += item_bytes
        yield self._slice(start, len(self.items))

    def _slice(self, start: int, end: int) -> StreamBatch:
        return StreamBatch(
            stream_ids=self.streams[start:end],
            seqs=self.seqs[start:end],
            items=self.items[start:end],
            last=[i - start for i in self.last if start <= i < end],
            statuses=[(i - start, status) for i, status in self.statuses if start <= i < end],
            large=[(i - start, handle) for i, handle in self.large if start <= i < end],
        )


class OutStream:
    """The sending end of one stream. Made by `StreamWriter.open`."""

    __slots__ = ("_gathered", "_seq", "_writer", "stream_id")

    def __init__(self, writer: StreamWriter, gathered: _Gathered, stream_id: int) -> None:
        self.stream_id = stream_id
        self._writer = writer
        self._gathered: _Gathered | None = gathered
        self._seq = 0

    def put(self, item: bytes, *, is_last: bool = False, status: int = 200) -> None:
        """Gather one item for the next `flush()`. Dropped after the last one, and when the destination is gone.

        Raises `BusError(overloaded)` if the item needs a handle and too much is held for pulling already.
        """
        gathered = self._gathered
        if gathered is None or gathered.is_gone:
            return
        index = len(gathered.items)
        if len(item) > INLINE_BYTES:
            gathered.large.append((index, self._writer.bulk.offer(item, lease_s=LEASE_S)))
            gathered.num_bytes += HANDLE_BYTES
            item = b""
        gathered.streams.append(self.stream_id)
        gathered.seqs.append(self._seq)
        gathered.items.append(item)
        gathered.num_bytes += len(item) + ITEM_BYTES
        self._seq += 1
        if status != 200:
            gathered.statuses.append((index, status))
        if is_last:
            gathered.last.append(index)
            self.close()

    def close(self) -> None:
        """Put no more. Idempotent; what was gathered is still sent."""
        self._gathered = None


class StreamWriter:
    """Gathers items of many streams and sends, at each flush, one message per destination.

    `on_fate(destination, is_taken)` is called with True for each receipt of the destination, with False when it is
    gone: its streams have no reader.
    """

    def __init__(self, bus: Bus, bulk: Bulk, on_fate: Callable[[str, bool], None]) -> None:
        self.bulk = bulk
        self._bus = bus
        self._on_fate = on_fate
        self._gathered: dict[str, _Gathered] = {}

    def open(self, address: Address[StreamBatch, Any], stream_id: int) -> OutStream:
        """A new stream to the reader at `address`, which has opened it under `stream_id`."""
        gathered = self._gathered.get(address.name)
        if gathered is None:
            gathered = _Gathered(address, lambda is_taken: self._heard(address.name, is_taken))
            self._gathered[address.name] = gathered
        return OutStream(self, gathered, stream_id)

    async def flush(
        self,
        may_send: Callable[[str], bool] = lambda destination: True,
        on_send: Callable[[str], None] = lambda destination: None,
    ) -> None:
        """Send all that was gathered for the destinations that `may_send`.

        `on_send` hears of each message before it goes out: its receipt may be faster than our return.
        """
        for gathered in list(self._gathered.values()):
            destination = gathered.address.name
            if gathered.items and may_send(destination):
                batches = list(gathered.batches())
                gathered.clear()
                for batch in batches:
                    on_send(destination)
                    await self._bus.tell(gathered.address, batch, on_fate=gathered.on_fate)

    def _heard(self, destination: str, is_taken: bool) -> None:
        if not is_taken:
            gone = self._gathered.pop(destination)
            gone.is_gone = True
            gone.clear()
        self._on_fate(destination, is_taken)


class InStream:
    """The receiving end of one stream: an async iterator of lists of items, all that have come since the last.

    Raises `BusError` after the items that came in order: `internal` for a gap, `deadline_exceeded` for a stall,
    `overloaded` for a consumer that lets too much pile up, `transfer_failed` for a large item that cannot be pulled.
    """

    def __init__(self, reader: StreamReader, stream_id: int, stall_s: float) -> None:
        self.stream_id = stream_id
        self.next_seq = 0
        self.touched = asyncio.get_running_loop().time()
        self._reader = reader
        self._stall_s = stall_s
        self._items: list[tuple[bytes | Handle, bool, int]] = []
        self._num_bytes = 0
        self._error: BusError | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(stall_s, self._check_stall)

    def __aiter__(self) -> InStream:
        return self

    async def __anext__(self) -> list[Item]:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._is_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._items, self._num_bytes = self._items, [], 0
        items = []
        for body, is_last, status in taken:
            if isinstance(body, Handle):
                body = await self._reader.bulk.pull(body, timeout_s=PULL_TIMEOUT_S)
            items.append(Item(body, is_last, status))
        return items

    def put(self, body: bytes | Handle, is_last: bool, status: int) -> None:
        """The next item has come. Dropped after the end."""
        if self._is_ended:
            return
        self._items.append((body, is_last, status))
        self._num_bytes += body.size_bytes if isinstance(body, Handle) else len(body)
        if is_last:
            self.close()
        elif self._num_bytes > self._reader.max_buffered_bytes and len(self._items) > 1:
            self._items.clear()
            self.fail(fail(Code.OVERLOADED, f"the reader of this stream left {self._num_bytes} bytes waiting"))
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: BusError) -> None:
        """End the stream with an error, after the items that are here."""
        if not self._is_ended:
            self._error = error
        self.close()

    def close(self) -> None:
        """Take no more. What has come can still be read. Idempotent."""
        self._is_ended = True
        self._timer.cancel()
        self._reader.forget(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_stall(self) -> None:
        loop = asyncio.get_running_loop()
        due = self.touched + self._stall_s
        if loop.time() >= due:
            self.fail(fail(Code.DEADLINE_EXCEEDED, f"nothing came on this stream for {self._stall_s:g} s"))
        else:
            self._timer = loop.call_at(due, self._check_stall)


class StreamReader:
    """Sorts batches into streams. One per reading actor."""

    def __init__(self, bulk: Bulk, *, max_buffered_bytes: int = MAX_BUFFERED_BYTES) -> None:
        self.bulk = bulk
        self.max_buffered_bytes = max_buffered_bytes
        self._streams: dict[int, InStream] = {}

    def open(self, stream_id: int, *, stall_s: float) -> InStream:
        """Expect a stream. It fails when nothing comes for `stall_s`, from now or from its last item."""
        if stream_id in self._streams:
            raise ValueError(f"stream {stream_id} is open already")
        stream = self._streams[stream_id] = InStream(self, stream_id, stall_s)
        return stream

    def feed(self, batch: StreamBatch) -> None:
        """Give each item to its stream. Items of unknown (ended, cancelled) streams and duplicates are dropped."""
        now = asyncio.get_running_loop().time()
        last, statuses, large = set(batch.last), dict(batch.statuses), dict(batch.large)
        streams = self._streams
        for i, (stream_id, seq, item) in enumerate(zip(batch.stream_ids, batch.seqs, batch.items, strict=True)):
            stream = streams.get(stream_id)
            if stream is None or seq < stream.next_seq:
                continue
            if seq > stream.next_seq:
                stream.fail(fail(Code.INTERNAL, f"items {stream.next_seq} to {seq - 1} of this stream were lost"))
                continue
            stream.next_seq = seq + 1
            stream.touched = now
            stream.put(large.get(i, item), i in last, statuses.get(i, 200))

    def forget(self, stream: InStream) -> None:
        """Stop expecting it. Idempotent."""
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]
