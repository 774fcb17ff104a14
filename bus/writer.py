"""The writing end of streamed replies: items of many streams gather, and go out as one message per destination."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from bus.bulk import INLINE_BYTES, LEASE_S, Bulk
from bus.bus import Bus
from bus.subjects import MAX_MESSAGE_BYTES, Address
from schemas.api import StreamBatch
from schemas.bulk import Handle

BATCH_BYTES = MAX_MESSAGE_BYTES - 1024
"""Items of one batch, with what surrounds them. The rest of a message is the batch's own frame."""

ITEM_BYTES = 32
"""What surrounds an item at most: stream id, number, length, place in `last` and `statuses`."""

HANDLE_BYTES = 256


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
        gathered.num_open += 1

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
        if self._gathered is not None:
            self._gathered.num_open -= 1
            self._gathered = None


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

    def open(self, address: Address[StreamBatch, Any], stream_id: int) -> OutStream:
        """A new stream to the reader at `address`, which has opened it under `stream_id`."""
        gathered = self._gathered.get(address.name)
        if gathered is None:
            gathered = _Gathered(address, lambda is_taken: self._heard(address.name, is_taken))
            self._gathered[address.name] = gathered
        return OutStream(self, gathered, stream_id)

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
        """Let go of destinations without open streams, when all has been sent."""
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
            self._on_gone(destination)
