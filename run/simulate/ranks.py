"""Ranks of an expert-parallel group with timed engines: who meets whom, and steps that are done when all have come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.engine import Chunk
from kernels.grouping import GroupError, Regrouping
from kernels.timed import TimedEngine

MEET_S = 5.0
"""For so long a rank waits for others at a meeting."""


class _Room:
    """Where some ranks have met, or are to: each step begins when all have come to it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_broken = False
        self._came: set[int] = set()
        self._all = asyncio.Event()
        self._said: dict[int, tuple[bool, bool]] = {}
        self._step: asyncio.Future[tuple[bool, bool]] = asyncio.get_running_loop().create_future()

    async def come(self, rank: int) -> None:
        self._came.add(rank)
        if len(self._came) == self.size:
            self._all.set()
        await self._wait(self._all.wait(), rank, MEET_S, "no meeting of all ranks")

    async def agree(self, rank: int, is_busy: bool, is_called_off: bool, timeout_s: float) -> tuple[bool, bool]:
        """Whether some rank is busy, and whether one has called the group off."""
        self._said[rank] = is_busy, is_called_off
        step = self._step
        if len(self._said) == self.size and not self.is_broken:
            busy, off = zip(*self._said.values(), strict=True)
            self._said, self._step = {}, asyncio.get_running_loop().create_future()
            step.set_result((any(busy), any(off)))
        await self._wait(asyncio.shield(step), rank, timeout_s, "an exchange failed")
        return step.result()

    async def _wait(self, what: Any, rank: int, timeout_s: float, error: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await what
        except TimeoutError:
            self.leave()
        if self.is_broken:
            raise GroupError(f"rank {rank} of {self.size}: {error}")

    def leave(self) -> None:
        """A rank is gone: who waits for it hears at once."""
        self.is_broken = True
        self._all.set()
        if not self._step.done():
            self._step.set_result((False, False))


class Crew:
    """The network of a group of `size` ranks. `load_s`: how long a rank loads what it lacks at a meeting."""

    def __init__(self, size: int, timeout_s: float = 15.0, load_s: float = 0.1) -> None:
        self.size, self.timeout_s, self.load_s = size, timeout_s, load_s
        self._rooms: dict[str, _Room] = {}
        self._num_addresses = 0

    def listen(self) -> str:
        self._num_addresses += 1
        return f"crew:{self._num_addresses}"

    async def meet(self, address: str, rank: int, size: int) -> _Room:
        if size == 1:
            return _Room(1)
        room = self._rooms.setdefault(address, _Room(size))
        await room.come(rank)
        return room


class Part:
    """A rank's part in it (`kernels.grouping.Member`)."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self.crew, self.rank, self.size = crew, rank, crew.size
        self.generation = self.num_steps = self.version = self.num_busy = 0
        self.is_awake = self.is_called_off = False
        self.is_broken = True
        self.places: list[npt.NDArray[np.int64]] = []
        self._room: _Room | None = None

    def listen(self) -> str:
        return self.crew.listen()

    async def meet(self, generation: int, rank: int, size: int, address: str) -> None:
        self.abandon()
        self.is_broken = True
        self.generation, self.rank, self.size = generation, rank, size
        self._room = await self.crew.meet(address, rank, size)
        await asyncio.sleep(self.crew.load_s)
        self.num_steps, self.is_awake, self.is_called_off, self.is_broken = 0, False, False, False
        await self.begin(is_busy=False)

    def call_off(self) -> None:
        self.is_called_off = True

    def abandon(self) -> None:
        if self._room is not None:
            self._room.leave()
            self._room = None

    def take_used(self) -> list[npt.NDArray[np.int64]]:
        return []

    async def rearrange(self, version: int, places: Sequence[npt.NDArray[np.int64]]) -> None:
        """There are no experts: nobody asks for it."""

    async def begin(self, *, is_busy: bool) -> None:
        """A step of all ranks. Raises GroupError when one is gone, Regrouping when one has called it off."""
        room, crew = self._room, self.crew
        try:
            if room is None:
                raise GroupError(f"rank {self.rank} of {self.size} has not met the others, or left them")
            self.is_awake, is_off = await room.agree(self.rank, is_busy, self.is_called_off, crew.timeout_s)
            self.num_steps += 1
            if is_off:
                raise Regrouping(f"rank {self.rank} of {self.size}: all leave to meet others")
        except GroupError:
            self.is_broken = True
            self.abandon()
            raise
        self.num_busy += is_busy


class Grouped(TimedEngine):
    """A timed engine that steps with the others of its group."""

    def __init__(self, crew: Crew, rank: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.part = Part(crew, rank)

    @property
    def group(self) -> Part:
        return self.part

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        await self.part.begin(is_busy=len(chunks) > 0)
        return await super().prefill(chunks)

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        await self.part.begin(is_busy=len(keys) > 0)
        return await super().decode(keys)

    async def close(self) -> None:
        self.part.abandon()
        await super().close()
