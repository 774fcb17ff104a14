"""The writing end of streamed replies: items of many streams gather, and go out as one message per destination."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from bus.bulk import INLINE_BYTES, LEASE_S, Bulk
from bus.bus import Bus
from bus.subjects import MAX_MESSAGE_BYTES, Address
from schemas.api import StreamBatch
from schemas.bulk import Handle

BATCH_BYTES = MAX_MESSAGE_BYTES - 1024
"""Items of one batch, with what surrounds them. The rest of a message is the batch's own frame."""

ITEM_BYTES = 48
"""What surrounds an item at most: stream id, number, length, place in `last`, `statuses` and `waits`."""

HANDLE_BYTES = 256

KEPT_ITEMS = 512
KEPT_BYTES = 256 * 1024
"""What is kept of a stream, to be sent again: its last items. More than is under way in a batch."""

KEPT_S = 10.0
"""How long that is, after its last item. A reader asks for a lost end within two of its looks."""


class _Gathered:
    """Items on their way to one destination, struct of arrays. Sent as few messages as the size contract allows."""

    __slots__ = (
        "address",
        "is_gone",
        "items",
        "large",
        "last",
        "num_bytes",
        "num_open",
        "on_fate",
        "seqs",
        "statuses",
        "streams",
        "waits",
    )

    def __init__(self, address: Address[StreamBatch, Any], on_fate: Callable[[bool], None]) -> None:
        self.address = address
        self.on_fate = on_fate
        self.is_gone = False
        self.num_open = 0
        self.clear()

    def clear(self) -> None:
        self.streams: list[int] = []
        self.seqs: list[int] = []
        self.items: list[bytes] = []
        self.last: list[int] = []
        self.statuses: list[tuple[int, int]] = []
        self.large: list[tuple[int, Handle]] = []
        self.waits: list[tuple[int, float]] = []
        self.num_bytes = 0

    def add(
        self, stream_id: int, seq: int, item: bytes | Handle, is_last: bool, status: int, retry_after_s: float
    ) -> None:
        """One more item."""
        index = len(self.items)
        if isinstance(item, Handle):
            self.large.append((index, item))
            self.num_bytes += HANDLE_BYTES
            item = b""
        self.streams.append(stream_id)
        self.seqs.append(seq)
        self.items.append(item)
        self.num_bytes += len(item) + ITEM_BYTES
        if status != 200:
            self.statuses.append((index, status))
        if retry_after_s:
            self.waits.append((index, retry_after_s))
        if is_last:
            self.last.append(index)

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
                waits=self.waits,
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
            waits=[(i - start, wait_s) for i, wait_s in self.waits if start <= i < end],
        )


class OutStream:
    """The sending end of one stream. Made by `StreamWriter.open`. Its last items are kept, to be sent again."""

    __slots__ = (
        "_gathered",
        "_retry_after_s",
        "_status",
        "_writer",
        "destination",
        "ended_s",
        "kept",
        "kept_bytes",
        "next_seq",
        "stream_id",
    )

    def __init__(self, writer: StreamWriter, gathered: _Gathered, stream_id: int) -> None:
        self.stream_id = stream_id
        self.destination = gathered.address.name
        self.next_seq = 0
        self.kept: deque[bytes | Handle] = deque()
        self.kept_bytes = 0
        self.ended_s: float | None = None
        self._status, self._retry_after_s = 200, 0.0
        self._writer = writer
        self._gathered: _Gathered | None = gathered
        gathered.num_open += 1

    def put(self, item: bytes, *, is_last: bool = False, status: int = 200, retry_after_s: float = 0.0) -> None:
        """Gather one item for the next `flush()`; a `status`, and when to try again, go with the last one. Dropped
        after it, and when the destination is gone.

        Raises `BusError(overloaded)` if the item needs a handle and too much is held for pulling already.
        """
        gathered = self._gathered
        if gathered is None or gathered.is_gone:
            return
        sent: bytes | Handle = item
        num_bytes = len(item)
        if num_bytes > INLINE_BYTES:
            sent, num_bytes = self._writer.bulk.offer(item, lease_s=LEASE_S), HANDLE_BYTES
        gathered.add(self.stream_id, self.next_seq, sent, is_last, status, retry_after_s)
        self.next_seq += 1
        kept = self.kept
        kept.append(sent)
        self.kept_bytes += num_bytes
        while len(kept) > KEPT_ITEMS or (self.kept_bytes > KEPT_BYTES and len(kept) > 1):
            first = kept.popleft()
            self.kept_bytes -= HANDLE_BYTES if isinstance(first, Handle) else len(first)
        if is_last:
            self._status, self._retry_after_s = status, retry_after_s
            self.ended_s = asyncio.get_running_loop().time()
            self.close()

    def close(self) -> None:
        """Put no more. Idempotent; what was gathered is still sent."""
        if self._gathered is not None:
            self._gathered.num_open -= 1
            self._gathered = None
            self._writer.closed(self)

    def put_again(self, gathered: _Gathered, from_seq: int) -> bool:
        """Gather the items from this number on once more, with their old numbers. False if one is not kept."""
        first = self.next_seq - len(self.kept)
        if from_seq < first:
            return False
        for seq in range(from_seq, self.next_seq):
            is_last = self.ended_s is not None and seq == self.next_seq - 1
            status, retry_after_s = (self._status, self._retry_after_s) if is_last else (200, 0.0)
            gathered.add(self.stream_id, seq, self.kept[seq - first], is_last, status, retry_after_s)
        return True


class Windows(Protocol):
    """What decides, purely, whether a destination can take another message (by its address's name)."""

    def may_send(self, destination: str, now_s: float) -> bool:
        """Is there room for another batch?"""
        ...

    def sent(self, destination: str, now_s: float) -> None:
        """A batch goes out: its receipt may be faster than our return."""
        ...

    def taken(self, destination: str, now_s: float) -> None:
        """A receipt came."""
        ...

    def drop(self, destination: str) -> None:
        """Nothing more goes there."""
        ...


class StreamWriter:
    """Gathers items of many streams and sends, at each flush, one message per destination.

    `on_receipt` is called when more may be sent, `on_gone` with the name of a destination where nobody listens: its
    streams have no reader.
    """

    def __init__(
        self, bus: Bus, bulk: Bulk, windows: Windows, on_receipt: Callable[[], None], on_gone: Callable[[str], None]
    ) -> None:
        self.bulk = bulk
        self._bus = bus
        self._windows = windows
        self._on_receipt = on_receipt
        self._on_gone = on_gone
        self._gathered: dict[str, _Gathered] = {}
        self._kept: dict[str, dict[int, OutStream]] = {}

    def open(self, address: Address[StreamBatch, Any], stream_id: int) -> OutStream:
        """A new stream to the reader at `address`, which has opened it under `stream_id`."""
        stream = OutStream(self, self._destination(address), stream_id)
        self._kept.setdefault(address.name, {})[stream_id] = stream
        return stream

    def _destination(self, address: Address[StreamBatch, Any]) -> _Gathered:
        gathered = self._gathered.get(address.name)
        if gathered is None:
            gathered = _Gathered(address, lambda is_taken: self._heard(address.name, is_taken))
            self._gathered[address.name] = gathered
        return gathered

    def repair(self, address: Address[StreamBatch, Any], stream_id: int, from_seq: int | None) -> int:
        """Gather again what the reader of this stream lacks, from this number on (None: nothing).

        Returns the number of its next item; -1 if it is not known here, or something that is missing is not kept.
        """
        stream = self._kept.get(address.name, {}).get(stream_id)
        if stream is None:
            return -1
        if from_seq is not None and from_seq < stream.next_seq:
            gathered = self._destination(address)
            is_waiting = (stream_id, from_seq) in zip(gathered.streams, gathered.seqs, strict=True)
            if not is_waiting and not stream.put_again(gathered, from_seq):
                return -1
        return stream.next_seq

    def closed(self, stream: OutStream) -> None:
        """A stream takes no more items. Without a last one nobody can want to read it."""
        if stream.ended_s is None:
            self._forget(stream)

    def _forget(self, stream: OutStream) -> None:
        streams = self._kept.get(stream.destination, {})
        if streams.get(stream.stream_id) is stream:
            del streams[stream.stream_id]
            if not streams:
                del self._kept[stream.destination]

    @property
    def num_waiting(self) -> int:
        """Items that have not gone out yet."""
        return sum(len(gathered.items) for gathered in self._gathered.values())

    async def flush(self) -> None:
        """Send all that was gathered for destinations that can take it."""
        now_s = asyncio.get_running_loop().time()
        for gathered in list(self._gathered.values()):
            destination = gathered.address.name
            if gathered.items and self._windows.may_send(destination, now_s):
                batches = list(gathered.batches())
                gathered.clear()
                for batch in batches:
                    self._windows.sent(destination, now_s)
                    await self._bus.tell(gathered.address, batch, on_fate=gathered.on_fate)

    def prune(self) -> None:
        """Let go of streams that ended KEPT_S ago, and of destinations without open streams, when all has been sent."""
        now_s = asyncio.get_running_loop().time()
        for streams in list(self._kept.values()):
            for stream in list(streams.values()):
                if stream.ended_s is not None and now_s - stream.ended_s > KEPT_S:
                    self._forget(stream)
        for destination, gathered in list(self._gathered.items()):
            if not gathered.num_open and not gathered.items:
                self._bus.forget(destination, gathered.on_fate)
                self._drop(destination)

    def _drop(self, destination: str) -> None:
        gone = self._gathered.pop(destination)
        gone.is_gone = True
        gone.clear()
        self._windows.drop(destination)

    def _heard(self, destination: str, is_taken: bool) -> None:
        if is_taken:
            self._windows.taken(destination, asyncio.get_running_loop().time())
            self._on_receipt()
        else:
            self._drop(destination)
            self._kept.pop(destination, None)
            self._on_gone(destination)
