"""What an actor that computes keeps for others: complete blocks go to the writers, windows stay in its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bus.actor import Envelope, Handler
from bus.blocks import BlockStore, Owners, Spawn
from bus.bulk import Bulk
from bus.bus import Bus
from bus.snapshots import Snapshots
from bus.subjects import EXITED, LOAD, Address, report_load
from schemas.liveness import ProcessExited
from schemas.message import Role
from schemas.routing import LoadReported, ReportLoad


class Source(Protocol):
    """An engine, as far as it is read: see `kernels.engine.Engine`."""

    async def blocks(self, key: str, first: int, num: int) -> list[bytes]: ...

    async def windows(self, key: str, num_tokens: int) -> bytes | None: ...


class Wanted(Protocol):
    """What of one request is worth keeping, under which keys: see actors/prefill/keeping.py."""

    @property
    def space(self) -> str: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def approximate(self) -> bool: ...

    def blocks(self, num_done: int) -> list[int]: ...

    def key(self, number: int) -> bytes: ...


class Keeper:
    """One actor's. `spawn` is the actor's, as `events` are to be among its; windows take at most `snapshot_bytes`."""

    def __init__(
        self, bus: Bus, bulk: Bulk, holder: str, to_owners: Callable[[], Owners], spawn: Spawn, snapshot_bytes: int
    ) -> None:
        self._bus = bus
        self._spawn = spawn
        self._has_room = snapshot_bytes > 0
        self.snapshots = Snapshots(bus, bulk, holder, to_owners(), snapshot_bytes)
        self._store = BlockStore(bus, bulk, to_owners(), spawn)

    def events(self) -> Mapping[Address[Any, Any], Handler]:
        """Who is there to keep things for it."""
        return {
            LOAD.at(Role.WRITER): self._on_writer,
            LOAD.at(Role.METADATA): self._on_metadata,
            EXITED.all(): self._on_exited,
        }

    async def start(self) -> None:
        """Ask who is there."""
        for role in (Role.WRITER, Role.METADATA):
            await self._bus.tell(report_load(role).all(), ReportLoad())

    def detail(self) -> dict[str, float]:
        """For a load report: totals since the start."""
        return {"stored_blocks": float(self._store.num_stored), "lost_blocks": float(self._store.num_lost)}

    @property
    def is_idle(self) -> bool:
        """All that was to be stored is, or is lost."""
        return not self._store.num_bytes

    def is_failed(self, owner: str) -> bool:
        """A block of this request was lost: nobody will find those behind it."""
        return self._store.is_failed(owner)

    def is_of_use(self) -> bool:
        """Whether windows kept now could be found: there is room for them, and a writer for the blocks before them."""
        return self._has_room and self._store.has_writers

    async def keep_blocks(self, engine: Source, owner: str, wanted: Wanted, num_done: int) -> None:
        """Read the blocks of the request `owner` that its first `num_done` tokens completed, and have them stored."""
        numbers = wanted.blocks(num_done)
        if not numbers or not self._store.takes(owner, len(numbers), len(numbers) * wanted.block_bytes):
            return
        first = numbers[0]
        read = await engine.blocks(owner, first, numbers[-1] + 1 - first)
        self._store.store(
            owner,
            wanted.space,
            [wanted.key(number) for number in numbers],
            [wanted.key(number - 1) for number in numbers],
            [read[number - first] for number in numbers],
            approximate=wanted.approximate,
        )

    async def keep_windows(
        self, engine: Source, owner: str, wanted: Wanted, ends: Sequence[tuple[int, int]]
    ) -> None:
        """Read the windows behind so many (blocks, tokens) of the request, and hold them."""
        if self._store.is_failed(owner):
            return  # without its blocks nobody can use them
        for number, num_tokens in ends:
            windows = await engine.windows(owner, num_tokens)
            if windows is not None:
                kept = self.snapshots.keep(wanted.key(number - 1), windows, approximate=wanted.approximate)
                self._spawn(kept)

    def forget(self, owner: str) -> None:
        """The request stores no more. Idempotent."""
        self._store.forget(owner)

    def close(self) -> None:
        """Hold nothing any more."""
        self.snapshots.clear()

    async def _on_writer(self, report: LoadReported, envelope: Envelope) -> None:
        self._store.on_load(report)

    async def _on_metadata(self, report: LoadReported, envelope: Envelope) -> None:
        await self.snapshots.on_load(report)

    async def _on_exited(self, exited: ProcessExited, envelope: Envelope) -> None:
        self._store.on_exited(exited)
        self.snapshots.on_exited(exited)
