"""An engine's part in a group (the contract is in `grouping.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kernels.group import Group
from kernels.grouping import GroupError
from kernels.lockstep import Lockstep
from kernels.places import Places
from kernels.thread import ComputeThread


class LocalMember:
    """Of a LocalEngine, whose steps run in `thread`; weights are loaded in a thread of their own, beside steps.

    `first` is run in it when the ranks have met for the first time: this one's first step, in which others serve it.
    """

    def __init__(
        self,
        group: Group,
        lockstep: Lockstep,
        thread: ComputeThread,
        first: Callable[[], None],
        serve: Callable[[], None],
    ) -> None:
        self._group, self._lockstep, self._thread = group, lockstep, thread
        self._first: Callable[[], None] | None = first
        self._serve = serve
        self.is_broken = True
        self._loading = ComputeThread("experts", 1)
        self._has_stepped = asyncio.Event()
        self._taken = [np.zeros(layer.num_experts, dtype=np.int64) for layer in lockstep.layers]

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def generation(self) -> int:
        return self._group.generation

    def listen(self) -> str:
        return self._group.listen()

    async def meet(self, generation: int, rank: int, size: int, address: str) -> None:
        self.is_broken = True
        try:
            await self._thread.run(lambda: self._meet(generation, rank, size, address))
        except GroupError:
            self._group.leave()  # or those who have met wait for us
            raise
        except Exception as error:  # another meeting would end like this one
            self.is_broken = False
            self.leave()
            raise RuntimeError(f"a meeting of the group failed here: {error!r}") from error
        self.is_broken = False

    def _meet(self, generation: int, rank: int, size: int, address: str) -> None:
        self._group.meet(generation, rank, size, address)
        self._lockstep.renew()
        agreed = self._lockstep.begin(is_busy=False, drafts=False, rows=self._first is not None)
        if self._first is not None:
            self._first()
            self._first = None
        elif agreed.rows:
            self._serve()

    def call_off(self) -> None:
        self._lockstep.is_called_off = True

    def abandon(self) -> None:
        self._group.leave()

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

    def stepped(self, *, is_broken: bool = False) -> None:
        """A step is over. Of a group that is broken nobody is left waiting."""
        if is_broken:
            self.is_broken = True
            self._group.leave()
        self._has_stepped.set()

    def leave(self) -> None:
        """The engine is closed, or of no use any more."""
        self._loading.close()
        self._group.leave()
