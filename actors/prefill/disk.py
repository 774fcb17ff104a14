"""Getting what is cached of a prompt: blocks from the slabs, read and checked beside the loop; windows from others."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from actors.prefill.job import Job, Loading
from actors.prefill.restore import Block, Fetched, Restored, Windows, open_slots
from actors.rules.chain import BLOCK_TOKENS
from actors.rules.hit import Hit
from actors.rules.location import SLOT_BITS, parse_name
from actors.rules.slab import HEADER_BYTES, Slab, layout_of
from bus.blocks import Spawn
from bus.bulk import Bulk
from bus.bus import Bus
from bus.files import Buffer, Files
from bus.insist import insist
from bus.snapshots import Snapshots
from bus.subjects import FAILED, SHORTENED, TOKENS
from kernels.engine import Engine, EngineInfo, Prefix
from schemas.cache import HitShortened
from schemas.handover import Dispatch
from schemas.message import Role
from schemas.request import Preempted, TokensEmitted

log = logging.getLogger("shoal.prefill")

RunBeside = Callable[[Callable[[], Any]], Awaitable[Any]]

TRIP_BYTES = 8 * 1024 * 1024
"""Read, and then checked, in one go: the grain at which other prompts get their turn."""

MAX_TRIPS = 4
"""Under way at once for one prompt."""

LOAD_S = 5.0
"""For all that is cached of a prompt: what is late is computed."""

HUNG_S = 10.0
"""After a load that brought nothing in time: nobody waits for a folder that hangs, until one tries again."""

WINDOWS_S = 2.0
"""For all snapshots of a prompt: to do without costs one block."""

LOAD_BYTES = 1 << 30
"""Of cached blocks that are being loaded, or wait for the engine."""

PULL_S = 8.0
"""For a long prompt, or images; less than the entrypoint waits for the answer."""

TELL_S = 2.0
TELL_TRIES = 3


async def pull(bulk: Bulk, dispatch: Dispatch) -> tuple[bytes, list[bytes]]:
    """The prompt of a request, which comes by handle when it is long, and the rows of its images. Raises BusError."""
    prompt, *rows = await asyncio.gather(
        bulk.unwrap(dispatch.prompt, timeout_s=PULL_S),
        *(bulk.pull(image.embeddings, timeout_s=PULL_S) for image in dispatch.images),
    )
    return prompt, rows


class SlabReader:
    """Reads blocks of an engine's own kind wherever they are in a folder of slabs."""

    def __init__(self, files: Files, run_beside: RunBeside) -> None:
        self._files = files
        self._run_beside = run_beside
        self._names: dict[int, str] = {}
        self.read_bytes = 0

    async def read(self, fetched: Fetched, expected: Slab) -> None:
        """Fill in all blocks, or why not; when it is cancelled some are missing. `expected`: what a slab is like."""
        trips = self._trips(fetched, max(1, TRIP_BYTES // expected.slot_bytes))
        await asyncio.gather(*(self._read_each(trips, fetched, expected) for _ in range(MAX_TRIPS)))

    def _trips(self, fetched: Fetched, per_trip: int) -> Iterator[list[int]]:
        """The blocks of each trip to one slab, so that those in front come first."""
        slabs: dict[int, list[int]] = {}
        for number, location in enumerate(fetched.locations):
            trip = slabs.setdefault(location.slab, [])
            trip.append(number)
            if len(trip) == per_trip:
                yield slabs.pop(location.slab)
        yield from slabs.values()

    async def _read_each(self, trips: Iterable[list[int]], fetched: Fetched, expected: Slab) -> None:
        for trip in trips:
            found = await self._read_trip(trip, fetched, expected)
            for number, block in zip(trip, found, strict=True):
                fetched.blocks[number] = block

    async def _read_trip(self, trip: Sequence[int], fetched: Fetched, expected: Slab) -> list[Block | str]:
        keys, locations = [fetched.keys[n] for n in trip], [fetched.locations[n] for n in trip]
        spans = [(expected.offset(location.slot), expected.slot_bytes) for location in locations]
        spans.append((0, HEADER_BYTES))  # last: so it is no older than the slots, which may not be of a later writer
        try:
            *slots, header = await self._read_slab(locations[0].slab, spans)
        except OSError as error:
            return [errno.errorcode.get(error.errno or 0, type(error).__name__)] * len(trip)
        self.read_bytes += sum(map(len, slots))
        found: list[Block | str] = await self._run_beside(lambda: open_slots(header, slots, keys, expected))
        return found

    async def _read_slab(self, slab: int, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """From the slab's file, which has one name for good: adopted, it is another slab. Raises OSError."""
        if slab not in self._names:
            named = [(parse_name(file.name), file.name) for file in await self._files.list()]
            self._names = {parsed[0]: name for parsed, name in named if parsed is not None}
        if slab not in self._names:
            raise FileNotFoundError(errno.ENOENT, f"no file of slab {slab:010x}")
        return await self._files.read(self._names[slab], spans)


class Loader:
    """Loads what is cached of prompts, each in a task of its own, gives it to the engine, and tells those who count on
    more what came of it."""

    def __init__(
        self,
        bus: Bus,
        files: Files,
        snapshots: Snapshots,
        spawn: Spawn,
        on_loaded: Callable[[Job], None],
        report_load: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._files = files
        self._snapshots = snapshots
        self._spawn = spawn
        self._on_loaded = on_loaded
        self._report_load = report_load
        self._reader = SlabReader(files, bus.seams.run_beside)
        self._num_restored = self._num_replayed = 0  # tokens
        self._again_s = 0.0  # by the loop's clock: before then nothing is read
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}
        self.returning: dict[str, Dispatch] = {}
        """What is returned, until the entrypoint knows: it may ask after it, and is not to hold it for lost."""

    def detail(self) -> dict[str, float]:
        """For a load report: totals since the start."""
        return {
            "restored_tokens": float(self._num_restored),
            "replayed_tokens": float(self._num_replayed),
            "read_bytes": float(self._reader.read_bytes),
            "snapshot_bytes": float(self._snapshots.pulled_bytes),
        }

    def begin(self, job: Job, info: EngineInfo) -> None:
        """Load what this job may restore, for an engine that is `info`; `on_loaded` is called at the end."""
        assert job.dispatch.prefix is not None
        self._loading[job.id] = self._spawn(self._load(job, Fetched(job.dispatch.prefix), expected_slab(info)))

    def settle(self, job: Job, restored: Restored, reason: str, fetched: Fetched | None = None) -> None:
        """It is known what is restored. The entrypoint is told of it if it counts on more, beside everything else."""
        shortened = job.settle(restored, reason, fetched)
        if shortened is None:
            return
        log.info("%d tokens of %s are restored: %s", restored.hit.start, job.id, reason)
        earlier = self._telling.pop(job.id, None)
        if not shortened.is_returned:
            self._telling[job.id] = self._spawn(self._tell(job, shortened, earlier))
            return
        if earlier is not None:
            earlier.cancel()
        self.returning[job.id] = job.dispatch
        self._spawn(self._return(job, shortened))  # whatever becomes of the job: it is over here

    async def resume(self, job: Job, engine: Engine) -> None:
        """Give the engine what was loaded for an admitted job; what it does not take is to be computed."""
        num_done = 0
        while num_tokens := job.restored.hit.num_blocks * BLOCK_TOKENS:
            prefix = Prefix(job.tokens[:num_tokens], job.restored.payloads, job.restored.windows)
            try:
                num_done = await engine.resume(job.id, prefix)
            except ValueError as error:  # damaged, or its windows are longer than what would be left to compute
                self.settle(job, job.restored.without_windows(), str(error))
                if job.is_returned:
                    break
                continue
            if num_done != job.restored.hit.start:
                hit = Hit(job.restored.hit.num_blocks, num_done)
                self.settle(job, replace(job.restored, hit=hit), "windows that are not of a block")
            self._num_restored += num_tokens
            self._num_replayed += num_tokens - num_done
            break
        job.resumed(num_done)

    async def told(self, job: Job) -> None:
        """Returns when the entrypoint knows, or cannot be told."""
        if (telling := self._telling.get(job.id)) is not None:
            await asyncio.wait([telling])

    def stop(self, job: Job) -> None:
        """The job is over: nothing of it is loaded, or told, any more. Idempotent."""
        for tasks in (self._loading, self._telling):
            if (task := tasks.pop(job.id, None)) is not None:
                task.cancel()

    async def close(self) -> None:
        """Let go of the folder. Idempotent."""
        await self._files.close()

    async def _load(self, job: Job, fetched: Fetched, expected: Slab) -> None:
        """Take what can be had in time. Cancelled at any point, it leaves nothing behind."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._again_s:
            try:
                async with asyncio.timeout(LOAD_S):
                    await asyncio.gather(self._reader.read(fetched, expected), self._pull(fetched))
                    await self._pull(fetched)  # a block that is not there asks for other windows
            except TimeoutError:
                if not any(fetched.blocks):
                    self._again_s = loop.time() + HUNG_S
        del self._loading[job.id]
        job.loading = Loading.DONE
        self.settle(job, fetched.restored(len(job.tokens)), fetched.why(), fetched)
        self._on_loaded(job)
        for failed in fetched.failed():
            await self._bus.tell(FAILED.at(Role.PREFILL), failed)

    async def _pull(self, fetched: Fetched) -> None:
        try:
            async with asyncio.timeout(WINDOWS_S):
                while wanted := fetched.wanted():
                    number, snapshot = wanted[0]
                    fetched.tried.add(number)
                    data = await self._snapshots.pull(snapshot)
                    if data is not None:
                        fetched.windows = Windows(number, data, snapshot.approximate)
                        self._spawn(self._snapshots.used(snapshot, data))
        except TimeoutError:  # whoever has the others as well
            fetched.tried.update(number for number, _ in fetched.prefix.snapshots)

    def give_back(self, job: Job, source: str) -> None:
        """It is not computed here; said until its entrypoint knows. Stale then if decode had claimed it after all."""
        self.returning[job.id] = job.dispatch
        self._spawn(self._give_back(job, job.ended(source, Preempted())))

    async def _give_back(self, job: Job, ended: TokensEmitted) -> None:
        await insist(self._bus, TOKENS.at(job.dispatch.entrypoint), ended, timeout_s=TELL_S, tries=TELL_TRIES)
        self._returned(job)

    async def _return(self, job: Job, shortened: HitShortened) -> None:
        await self._tell(job, shortened, None)
        self._returned(job)

    def _returned(self, job: Job) -> None:
        if self.returning.get(job.id) is job.dispatch:
            del self.returning[job.id]

    async def _tell(self, job: Job, shortened: HitShortened, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        await self._report_load()  # what is to be computed, as the reservation has it, is more
        await insist(self._bus, SHORTENED.at(job.dispatch.entrypoint), shortened, timeout_s=TELL_S, tries=TELL_TRIES)


def expected_slab(info: EngineInfo) -> Slab:
    """What a slab of this engine's blocks is like; how many slots it has is in its own header."""
    return Slab(info.block_bytes, 1 << SLOT_BITS, layout_of(info.space), 0)
