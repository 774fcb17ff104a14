"""An engine's part in a group (the contract is in `engine.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.group import Group
from kernels.lockstep import Lockstep
from kernels.places import Places
from kernels.thread import ComputeThread


class LocalMember:
    """Of a LocalEngine, whose steps run in `thread`; weights are loaded in a thread of their own, beside steps."""

    def __init__(self, group: Group, lockstep: Lockstep, thread: ComputeThread) -> None:
        self.rank, self.size, self.lives = group.rank, group.size, group.lives
        self._group, self._lockstep, self._thread = group, lockstep, thread
        self.is_broken = False
        self._loading = ComputeThread("experts", 1)
        self._has_stepped = asyncio.Event()
        self._taken = [np.zeros(layer.num_experts, dtype=np.int64) for layer in lockstep.layers]

    @property
    def generation(self) -> int:
        return self._group.generation

    @property
    def num_steps(self) -> int:
        return self._lockstep.num_steps

    @property
    def is_awake(self) -> bool:
        return self._lockstep.is_awake

    @property
    def version(self) -> int:
        return self._lockstep.version

    @property
    def places(self) -> list[Places]:
        return [layer.places for layer in self._lockstep.layers]

    @property
    def exchange_ns(self) -> int:
        """Spent in exchanges since the start, waiting for others included."""
        return self._group.exchange_ns

    def take_used(self) -> list[npt.NDArray[np.int64]]:
        used = [layer.used.copy() for layer in self._lockstep.layers]
        since = [now - then for now, then in zip(used, self._taken, strict=True)]
        self._taken = used
        return since

    async def rearrange(self, version: int, places: Sequence[Places]) -> None:
        lockstep = self._lockstep
        await self._thread.run(lambda: lockstep.rearrange(version, places))
        while lockstep.version < version:
            if await self._loading.run(lockstep.load_next):
                continue
            self._has_stepped.clear()
            await self._has_stepped.wait()

    def stepped(self, *, is_broken: bool) -> None:
        """A step is over."""
        self.is_broken |= is_broken
        self._has_stepped.set()

    def leave(self) -> None:
        """The engine is closed."""
        self._loading.close()
        self._group.leave()
