"""The reading end of streamed replies: numbered items and one terminal item, many streams in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from bus.bulk import Bulk
from bus.bus import BusError, fail
from schemas.api import StreamBatch
from schemas.bulk import Handle
from schemas.failure import Code

MAX_BUFFERED_BYTES = 2 * 1024 * 1024
"""What one stream may hold for a consumer that does not come for it. The longest answers end in one of half that."""

PULL_TIMEOUT_S = 10.0


class Item(NamedTuple):
    """One item of a stream. `status` is an HTTP status, `retry_after_s` when to try again, 0 when nobody knows; after
    `is_last` nothing follows."""

    body: bytes
    is_last: bool
    status: int
    retry_after_s: float = 0.0


class InStream:
    """The receiving end of one stream: an async iterator of lists of items, all that have come since the last.

    Raises `BusError` after the items that came in order: `deadline_exceeded` for a stall, `transfer_failed` for a large
    item that cannot be pulled. A consumer that lets too much pile up loses that, and gets `client_too_slow`.
    """

    def __init__(self, reader: StreamReader, stream_id: int, stall_s: float) -> None:
        self.stream_id = stream_id
        self.next_seq = 0
        self.num_bytes = 0  # held for the consumer; a large item waits with its writer
        self.touched = asyncio.get_running_loop().time()
        self._reader = reader
        self._stall_s = stall_s
        self._items: list[tuple[bytes | Handle, bool, int, float]] = []
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
        taken, self._items, self.num_bytes = self._items, [], 0
        items = []
        for body, is_last, status, retry_after_s in taken:
            if isinstance(body, Handle):
                body = await self._reader.bulk.pull(body, timeout_s=PULL_TIMEOUT_S)
            items.append(Item(body, is_last, status, retry_after_s))
        return items

    def put(self, body: bytes | Handle, is_last: bool, status: int, retry_after_s: float = 0.0) -> None:
        """The next item has come. Dropped after the end."""
        if self._is_ended:
            return
        self._items.append((body, is_last, status, retry_after_s))
        self.num_bytes += 0 if isinstance(body, Handle) else len(body)
        if is_last:
            self.close()
        elif self._waiter is not None:  # however much comes at once, it is not slow: it had no chance yet
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self.num_bytes > MAX_BUFFERED_BYTES:
            failure = fail(Code.CLIENT_TOO_SLOW, f"the reader of this stream left {self.num_bytes} bytes waiting")
            self._items.clear()
            self.num_bytes = 0
            self.fail(failure)
            self._reader.on_too_slow(self)

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
    """Sorts batches into streams. One per reading actor.

    `on_too_slow` hears at once when a stream ends as its consumer does not come; who reads it may be stuck for long.
    """

    def __init__(self, bulk: Bulk, on_too_slow: Callable[[InStream], None]) -> None:
        self.bulk = bulk
        self.on_too_slow = on_too_slow
        self._streams: dict[int, InStream] = {}

    def open(self, stream_id: int, *, stall_s: float) -> InStream:
        """Expect a stream. It fails when nothing comes for `stall_s`, from now or from its last item."""
        if stream_id in self._streams:
            raise ValueError(f"stream {stream_id} is open already")
        stream = self._streams[stream_id] = InStream(self, stream_id, stall_s)
        return stream

    def feed(self, batch: StreamBatch) -> list[InStream]:
        """Give each item to its stream. Items of unknown (ended, cancelled) streams and duplicates are dropped.

        So are items behind a gap. The streams that have one are returned: have the writer `repair` them from their
        `next_seq` on.
        """
        now = asyncio.get_running_loop().time()
        last, statuses, large, waits = set(batch.last), dict(batch.statuses), dict(batch.large), dict(batch.waits)
        streams = self._streams
        behind: dict[InStream, None] = {}
        for i, (stream_id, seq, item) in enumerate(zip(batch.stream_ids, batch.seqs, batch.items, strict=True)):
            stream = streams.get(stream_id)
            if stream is None or seq < stream.next_seq:
                continue
            if seq > stream.next_seq:
                behind[stream] = None
                continue
            stream.next_seq = seq + 1
            stream.touched = now
            stream.put(large.get(i, item), i in last, statuses.get(i, 200), waits.get(i, 0.0))
        return list(behind)

    def forget(self, stream: InStream) -> None:
        """Stop expecting it. Idempotent."""
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]
