"""Slots and their bytes on the disk, kept in step: what can be found is whole there, what can be taken is free there.

What takes long is computed beside the loop. Nothing is synced: a block that a failing machine loses is a miss, by its
header or its checksum.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from actors.rules.keys import Keys
from actors.rules.keys import keys as as_keys
from actors.rules.location import SLAB_BITS, file_name
from actors.rules.slab import FREE, HEADER_BYTES, Buffer, Slab, SlotError, SlotHeader, pack_header, read_slot
from actors.rules.slab import scan_headers as scan
from actors.writer.held import HeldSlab, Place
from actors.writer.slots import Slots, Words
from bus.blocks import BATCH_BLOCKS
from bus.files import Files

log = logging.getLogger("shoal.writer")

SCAN_SLOTS = 2048
"""How many headers are read, and then told of, in one go."""

CHECK_SLOTS = 32
MAX_SUSPECTS = 65_536
"""Blocks of failed reads that are looked at in one go, and that wait for it."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class Block(NamedTuple):
    """What is to be in a slot."""

    key: bytes
    parent: bytes
    payload: Buffer


class Disk:
    """The folder as the writer of `slots` sees it. Events of what changes are left in `slots.outbox`."""

    def __init__(self, slots: Slots, files: Files, run_beside: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self.files = files
        self._slots = slots
        self._run_beside = run_beside
        self.suspects: dict[Place, bytes] = {}
        """Blocks that could not be read, by their key."""
        self._left: dict[int, int] = {}  # files of our name that are not held: number to size

    # Blocks

    async def store(self, places: Sequence[Place], blocks: Sequence[Block], *, approximate: bool) -> int:
        """Have these blocks in these busy places; how many can be found now that could not, or are better than before.

        Raises the OSError that some of them met: those cannot be found, the others can.
        """
        num_new, failure = 0, None
        for held, some in _by_slab(places).items():
            numbers = sorted((number for number in some), key=lambda number: places[number].slot)
            ours, theirs = [places[number] for number in numbers], [blocks[number] for number in numbers]
            try:
                await self._write(held, ours, theirs, approximate=approximate)
            except OSError as error:
                failure = error
                await self.free(ours)
                continue
            keys, parents = _array([block.key for block in theirs]), _array([block.parent for block in theirs])
            num, surplus = self._slots.commit(ours, keys, parents, np.full(len(ours), approximate))
            num_new += num
            await self.free(surplus)
        if failure is not None:
            raise failure
        return num_new

    async def free(self, places: Sequence[Place]) -> None:
        """Write busy places free, so that they can be taken again. What cannot be written is tried another time."""
        for held, numbers in _by_slab(places).items():
            if not self._slots.holds(held):
                continue
            some = sorted((places[number] for number in numbers), key=lambda place: place.slot)
            try:
                await self.files.write(held.name, [(held.slab.offset(slot), FREE) for _, slot in some])
            except FileNotFoundError:
                await self.forget_missing()
            except OSError as error:
                log.warning("%d slots of %s could not be freed: %s", len(some), held.name, error)
                self._slots.fail(some)
            else:
                self._slots.release(some)

    def suspect(self, keys: Keys, locations: Words) -> None:
        """Somebody could not read these: those that are there are to be checked, of the others it is told."""
        self._slots.deny(keys, locations)
        for place in self._slots.at(keys, locations)[: MAX_SUSPECTS - len(self.suspects)]:
            self.suspects[place] = place.held.keys[place.slot].tobytes()

    async def check(self) -> None:
        """Read some suspects of one file, and drop those that do not have the block with their key any more."""
        held = next(iter(self.suspects)).held
        places = list(islice((place for place in self.suspects if place.held is held), CHECK_SLOTS))
        suspects = [(place.slot, self.suspects.pop(place)) for place in places]
        try:
            are_whole = await self._are_whole(held, suspects)
        except FileNotFoundError:
            await self.forget_missing()
            return
        except OSError as error:
            log.warning("%d blocks of %s cannot be read: %s", len(suspects), held.name, error)
            are_whole = [False] * len(suspects)
        bad = [suspect for suspect, is_whole in zip(suspects, are_whole, strict=True) if not is_whole]
        words = np.array([held.location(slot) for slot, _ in bad], np.uint64)
        await self.free(self._slots.drop(_array([key for _, key in bad]), words))

    # Files

    async def create(self, number: int, slab: Slab) -> None:
        """A new file with free slots only: a smaller one, as long as it holds what comes at a time, where the disk has
        no place for it. Raises OSError: then there is none."""
        name = file_name(number, self._slots.writer)
        try:
            await self.files.create(name, slab.file_bytes)
        except OSError as error:
            if error.errno not in FULL or slab.num_slots < 2 * BATCH_BLOCKS:
                raise
            log.info("writer %s has no place for a file of %d bytes", self._slots.writer, slab.file_bytes)
            return await self.create(number, replace(slab, num_slots=slab.num_slots // 2))
        try:
            await self.files.write(name, [(0, slab.pack())])
        except BaseException:
            self._left[number] = slab.file_bytes
            with suppress(OSError):
                await self.files.remove(name)
                del self._left[number]
            raise
        self._slots.add(number, slab)

    async def remove(self, held: HeldSlab) -> None:
        """Remove a file, with all that is in it. Raises OSError."""
        self._slots.forget(held)
        self._left[held.number] = held.slab.file_bytes
        await self.files.remove(held.name)
        del self._left[held.number]

    async def take_over(self, number: int, size_bytes: int) -> None:
        """Become the writer of a file that has our name, under a higher epoch; what is no slab is removed."""
        name = file_name(number, self._slots.writer)
        is_known = self._left.pop(number, None) is not None
        try:
            try:
                slab, headers = await self._scan(number, size_bytes)
            except SlotError as error:
                await self.files.remove(name)
                log.warning("%s is removed, for it is no slab: %s", name, error)
                return
        except FileNotFoundError:
            log.warning("%s is gone", name)
            return
        except OSError as error:
            log.log(logging.INFO if is_known else logging.WARNING, "%s is left alone for now: %s", name, error)
            self._left[number] = size_bytes
            return
        held = self._slots.add(number, slab, [slot for slot, _ in headers])
        for first in range(0, len(headers), SCAN_SLOTS):
            await self.free(self._slots.fill(held, headers[first : first + SCAN_SLOTS]))
            await asyncio.sleep(0)

    async def retry(self) -> None:
        """What could not be done before: slots written free, files taken over or removed."""
        await self.free(self._slots.stuck())
        for number, size_bytes in list(self._left.items()):
            await self.take_over(number, size_bytes)

    async def forget_missing(self) -> None:
        """A file was not found: which of ours are gone?"""
        ours = self._slots.slabs  # before the list is made: what is new since may not be in it
        try:
            there = {info.name for info in await self.files.list()}
        except OSError as error:
            log.warning("the folder cannot be listed: %s", error)
            return
        for held in ours:
            if held.name not in there:
                log.warning("%s is gone", held.name)
                self._slots.forget(held)

    # Bytes

    async def _write(
        self, held: HeldSlab, places: Sequence[Place], blocks: Sequence[Block], *, approximate: bool
    ) -> None:
        """Until all payloads are there, the headers say that nothing is."""
        slab = held.slab

        def pack() -> Iterator[tuple[int, Buffer]]:
            headers: list[tuple[int, Buffer]] = []
            for (_, slot), (key, parent, payload) in zip(places, blocks, strict=True):
                start = slab.offset(slot)
                headers.append((start, pack_header(slab, key, parent, payload, approximate=approximate)))
                yield start, FREE
                yield start + HEADER_BYTES, payload
            yield from headers

        await self.files.write(held.name, pack())

    async def _scan(self, number: int, size_bytes: int) -> tuple[Slab, Sequence[tuple[int, SlotHeader]]]:
        """Which slots have what blocks, as far as their headers can tell."""
        if number >> SLAB_BITS:
            raise SlotError("magic", "its number is too large")
        name = file_name(number, self._slots.writer)
        (data,) = await self.files.read(name, [(0, HEADER_BYTES)])
        before = Slab.unpack(data)
        slab = replace(before, epoch=before.epoch + 1)
        await self.files.write(name, [(0, slab.pack())])
        num_slots = min(slab.num_slots, (size_bytes - HEADER_BYTES) // slab.slot_bytes)
        found: list[tuple[int, SlotHeader]] = []
        for first in range(0, num_slots, SCAN_SLOTS):
            slots = range(first, min(first + SCAN_SLOTS, num_slots))
            headers = await self.files.read(name, [(slab.offset(slot), HEADER_BYTES) for slot in slots])
            found += await self._run_beside(partial(list, scan(headers, slab, first)))
        return slab, found

    async def _are_whole(self, held: HeldSlab, suspects: Sequence[tuple[int, bytes]]) -> Sequence[bool]:
        """Whether each slot has the block with its key. A damaged file header is mended; under a later epoch than ours
        the file is not ours any more."""
        slab = held.slab
        spans = [(0, HEADER_BYTES), *((slab.offset(slot), slab.slot_bytes) for slot, _ in suspects)]
        header, *slots = await self.files.read(held.name, spans)
        if header != slab.pack():
            if _epoch(header) > slab.epoch:
                log.error("another writer %s has taken %s over", self._slots.writer, held.name)
                self._slots.forget(held)
                return [False] * len(suspects)
            log.warning("the header of %s is mended", held.name)
            await self.files.write(held.name, [(0, slab.pack())])

        def check() -> Sequence[bool]:
            return [_is_whole(data, slab, key) for data, (_, key) in zip(slots, suspects, strict=True)]

        checked: Sequence[bool] = await self._run_beside(check)
        return checked


def _epoch(header: Buffer) -> int:
    """That of a file; 0 if its header is damaged."""
    try:
        return Slab.unpack(header).epoch
    except SlotError:
        return 0


def _is_whole(data: Buffer, slab: Slab, key: bytes) -> bool:
    try:
        read_slot(data, slab, key)
    except SlotError:
        return False
    return True


def _by_slab(places: Sequence[Place]) -> dict[HeldSlab, list[int]]:
    """Numbers of the places in each file."""
    found: dict[HeldSlab, list[int]] = {}
    for number, place in enumerate(places):
        found.setdefault(place.held, []).append(number)
    return found


def _array(keys: Sequence[bytes]) -> Keys:
    return as_keys(b"".join(keys))
