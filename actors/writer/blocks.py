"""Blocks with their places as arrays, and as the messages that tell of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.rules.keys import Keys, owners
from schemas.cache import BlocksDropped, BlocksStored

MAX_EVENT_BLOCKS = 4096
"""40 bytes each: two thirds of the size contract."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """`keys` and `parents` u64 [num, 2], `locations` u64 [num]."""

    keys: Keys
    parents: Keys
    locations: npt.NDArray[np.uint64]

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """All of these."""
        if not parts:
            return cls(np.zeros((0, 2), np.uint64), np.zeros((0, 2), np.uint64), np.zeros(0, np.uint64))
        columns = zip(*((part.keys, part.parents, part.locations) for part in parts), strict=True)
        keys, parents, locations = (np.concatenate(column) for column in columns)
        return cls(keys, parents, locations)

    def owned(self, shard: str, shards: Sequence[str]) -> Blocks:
        """Those that `shard` owns among `shards`; all, if there are none."""
        if not shards:
            return self
        chosen = np.array(shards)[owners(self.keys, shards)] == shard
        return Blocks(self.keys[chosen], self.parents[chosen], self.locations[chosen])

    def stored(self, writer: str, incarnation: str, seq: int) -> Iterator[BlocksStored]:
        """Events that they are there, from number `seq` on, each within the size contract."""
        for number, part in enumerate(self._pieces()):
            yield BlocksStored(
                writer=writer,
                incarnation=incarnation,
                seq=seq + number,
                keys=part.keys.tobytes(),
                parents=part.parents.tobytes(),
                locations=part.locations.tobytes(),
            )

    def dropped(self, writer: str, incarnation: str, seq: int) -> Iterator[BlocksDropped]:
        """Events that they are not there any more, as `stored`."""
        for number, part in enumerate(self._pieces()):
            yield BlocksDropped(
                writer=writer,
                incarnation=incarnation,
                seq=seq + number,
                keys=part.keys.tobytes(),
                locations=part.locations.tobytes(),
            )

    def __len__(self) -> int:
        return len(self.locations)

    def _pieces(self) -> Iterator[Blocks]:
        for first in range(0, len(self), MAX_EVENT_BLOCKS):
            some = slice(first, first + MAX_EVENT_BLOCKS)
            yield Blocks(self.keys[some], self.parents[some], self.locations[some])
