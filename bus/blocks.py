"""Blocks on their way to the writers: handed over without waiting, sent in the background, lost when that fails."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from bus.bulk import Bulk
from bus.bus import Bus, BusError
from bus.subjects import STORE
from schemas.cache import StoreBlocks
from schemas.failure import Code
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported

log = logging.getLogger("shoal.bus")

QUEUE_BYTES = 64 * 1024 * 1024
"""What may wait for writers, by default. What is being sent is held once more, as messages."""

BATCH_BYTES = 4 * 1024 * 1024
BATCH_BLOCKS = 64
"""How much one message carries at most. With a quarter of these bytes all sides together work half as much again."""

MAX_MESSAGES = 2
"""How many messages are under way to one writer: while it writes one, the next is there already. More of them only get
in each other's way."""

STORE_S = 10.0
"""How long a writer may be silent."""

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class Owners(Protocol):
    """Which member of a role owns a key, as everyone decides it: see actors/rules/ring.py. Times are seconds."""

    def saw(self, id: str, incarnation: str, now_s: float) -> bool:
        """Note a report. True if this member is new, or has restarted since."""
        ...

    def forget(self, id: str) -> None:
        """It is gone, or will be."""
        ...

    def alive(self, now_s: float) -> list[str]:
        """The members there are."""
        ...

    def of(self, wanted: Sequence[bytes], now_s: float) -> list[str]:
        """For each key the member that owns it; an empty list when there are no members."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    is_failed: bool = False


@dataclass(slots=True, eq=False)
class _Block:
    request: _Request
    kind: tuple[str, bool, int]  # what all blocks of one message have in common: space, approximate, size
    key: bytes
    parent: bytes
    payload: bytes


@dataclass(slots=True, eq=False)
class _Lane:
    """What goes to one life of one writer."""

    writer: str
    waiting: deque[_Block] = field(default_factory=deque)
    senders: set[asyncio.Task[None]] = field(default_factory=set)


class BlockStore:
    """Stores blocks behind the back of whoever computes them. Nothing is retried: a block that was not stored is
    computed again by whoever needs it.

        blocks = BlockStore(bus, bulk, Ring(), self.spawn)  # Ring: actors/rules/ring.py; spawn: the actor's
        blocks.on_load(report)                              # each LOAD of a writer; on_exited: each EXITED
        blocks.store("r1", space, keys, parents, payloads, approximate=False)
        blocks.forget("r1")                                 # when the request has ended

    A request of which one block was lost stores no more: a block behind it would never be found.
    """

    def __init__(self, bus: Bus, bulk: Bulk, owners: Owners, spawn: Spawn, max_bytes: int = QUEUE_BYTES) -> None:
        self._bus = bus
        self._bulk = bulk
        self._owners = owners
        self._spawn = spawn
        self._max_bytes = max_bytes
        self._lanes: dict[str, _Lane] = {}
        self._requests: dict[str, _Request] = {}
        self.num_bytes = 0
        self.num_stored = 0
        self.num_lost = 0

    def on_load(self, report: LoadReported) -> None:
        """To be told of every load report of a writer."""
        if not report.is_accepting:
            self._owners.forget(report.id)
        elif self._owners.saw(report.id, report.incarnation, asyncio.get_running_loop().time()):
            self._close(report.id)

    def on_exited(self, exited: ProcessExited) -> None:
        """To be told of every process that ended: what its writers have not answered is lost."""
        for id in exited.ids(Role.WRITER):
            self._owners.forget(id)
            self._close(id)

    def store(
        self,
        owner: str,
        space: str,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        approximate: bool,
    ) -> bool:
        """Have these blocks of the request `owner` stored, all or none, soon. Never waits.

        False, and they are lost: too much waits already, there are no writers, or the request has lost one before.
        """
        size_bytes = sum(map(len, payloads))
        if not self.takes(owner, len(keys), size_bytes):
            return False
        request = self._requests[owner]
        writers = self._owners.of(keys, asyncio.get_running_loop().time())
        self.num_bytes += size_bytes
        for writer, key, parent, payload in zip(writers, keys, parents, payloads, strict=True):
            lane = self._lanes.setdefault(writer, _Lane(writer))
            lane.waiting.append(_Block(request, (space, approximate, len(payload)), key, parent, payload))
        for writer in dict.fromkeys(writers):
            self._start_sender(self._lanes[writer])
        return True

    def takes(self, owner: str, num_blocks: int, size_bytes: int) -> bool:
        """Whether `store` would take so many blocks of this request, of `size_bytes` together: to be asked before they
        are read. If not, they are lost."""
        request = self._requests.setdefault(owner, _Request())
        if request.is_failed or not self.has_writers or self.num_bytes + size_bytes > self._max_bytes:
            request.is_failed = True
            self.num_lost += num_blocks
            return False
        return True

    @property
    def has_writers(self) -> bool:
        """Without any, all blocks are lost."""
        return bool(self._owners.alive(asyncio.get_running_loop().time()))

    def is_failed(self, owner: str) -> bool:
        """Whether a block of this request was lost."""
        return owner in self._requests and self._requests[owner].is_failed

    def forget(self, owner: str) -> None:
        """The request stores no more. What waits is stored all the same. Idempotent."""
        self._requests.pop(owner, None)

    # Inside

    def _start_sender(self, lane: _Lane) -> None:
        if lane.waiting and len(lane.senders) < MAX_MESSAGES:
            sender = self._spawn(self._send(lane))
            lane.senders.add(sender)

    async def _send(self, lane: _Lane) -> None:
        try:
            while batch := self._take(lane.waiting):
                self._start_sender(lane)
                is_written = False
                try:
                    is_written = await self._write(lane, batch)
                finally:
                    self._settle(batch, is_written)
        finally:  # in the same turn: a callback later would leave unsent what comes meanwhile
            lane.senders.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _take(self, waiting: deque[_Block]) -> list[_Block]:
        """The next message's worth of blocks of one kind."""
        batch: list[_Block] = []
        while waiting and len(batch) < BATCH_BLOCKS:
            block = waiting[0]
            if batch and (block.kind != batch[0].kind or (len(batch) + 1) * len(block.payload) > BATCH_BYTES):
                break
            waiting.popleft()
            if block.request.is_failed:
                self._settle([block], is_written=False)
            else:
                batch.append(block)
        return batch

    async def _write(self, lane: _Lane, batch: Sequence[_Block]) -> bool:
        space, approximate, _ = batch[0].kind
        try:
            payloads = await self._bulk.wrap(b"".join(block.payload for block in batch))
            try:
                message = StoreBlocks(
                    space=space,
                    keys=b"".join(block.key for block in batch),
                    parents=b"".join(block.parent for block in batch),
                    payloads=payloads,
                    approximate=approximate,
                )
                await self._bus.ask(STORE.at(lane.writer), message, timeout_s=STORE_S)
            finally:
                if payloads.handle is not None:
                    self._bulk.withdraw(payloads.handle)
        except BusError as error:
            log.info("%d blocks were not stored by writer %s: %s", len(batch), lane.writer, error)
            if error.code is Code.DEADLINE_EXCEEDED:  # it hangs: what waits for it is not to take the place of others'
                self._lose_waiting(lane)
            return False
        return True

    def _settle(self, blocks: Sequence[_Block], is_written: bool) -> None:
        self.num_bytes -= sum(len(block.payload) for block in blocks)
        if is_written:
            self.num_stored += len(blocks)
            return
        self.num_lost += len(blocks)
        for block in blocks:
            block.request.is_failed = True

    def _lose_waiting(self, lane: _Lane) -> None:
        self._settle(lane.waiting, is_written=False)
        lane.waiting.clear()

    def _close(self, writer: str) -> None:
        """It has ended, and with it all that it was sent."""
        lane = self._lanes.pop(writer, None)
        if lane is not None:
            self._lose_waiting(lane)
            for sender in lane.senders:
                sender.cancel()
