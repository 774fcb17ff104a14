"""An engine's part in an expert-parallel group: the contract, free of torch, free of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kernels.places import Places


class GroupError(RuntimeError):
    """A rank is gone, or did not answer in time: the ranks that are left may meet again. Says which rank found out."""


class Regrouping(GroupError):
    """A rank has called the group off, and all have left it at the beginning of this step: nothing was computed."""


class Member(Protocol):
    """An engine's part in an expert-parallel group: its ranks compute every step together, also with nothing of their
    own, as each has experts that the others need. A rank that steps waits for all others to do so.

    Those that are there meet, and share all experts; when one goes, or comes, they meet anew, as fewer or more.
    """

    @property
    def rank(self) -> int:
        """Which of those that have met."""
        ...

    @property
    def size(self) -> int:
        """How many have met; before that, how many ranks there should be."""
        ...

    @property
    def generation(self) -> int:
        """That of the last meeting, 0 before the first."""
        ...

    def listen(self) -> str:
        """Where this rank can be met as the first one of a meeting. Not while it meets."""
        ...

    async def meet(self, generation: int, rank: int, size: int, address: str) -> None:
        """Meet as the `rank`th of `size`, at the `address` where the first one listens, which one alone does not need;
        generations grow. Experts that nobody else has are loaded. Requests keep their state. Between steps.

        Raises GroupError when one of the others does not come, or is gone; RuntimeError when it is this one that
        cannot, after which it is of no use.
        """
        ...

    def call_off(self) -> None:
        """Have all ranks leave the group at the beginning of their next step, which raises Regrouping."""
        ...

    def abandon(self) -> None:
        """Leave the group, as it is broken: the next exchange here raises GroupError. At any time."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps that the group has done; the same on all its ranks."""
        ...

    @property
    def is_awake(self) -> bool:
        """Whether some rank had requests in the last step: then all have to take part in the next one."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether it has to meet the others, for the first time or again, before there can be a step. Not if it is of
        no use any more."""
        ...

    @property
    def version(self) -> int:
        """Of the places of experts that all layers have."""
        ...

    @property
    def places(self) -> list[Places]:
        """The experts at the places of each rank, for each layer of the backbone, then each draft stage."""
        ...

    def take_used(self) -> list[npt.NDArray[np.int64]]:
        """How many rows of this rank went to each expert since this was last asked, for each layer. Between steps."""
        ...

    async def rearrange(self, version: int, places: Sequence[Places]) -> None:
        """Go on with other places, each layer at a step that the ranks agree on; returns when all have them.

        All ranks are to be told the same. Weights are loaded beside steps, and taken over by those that come: without
        any it waits. A version that is not newer changes nothing; a newer one replaces what is not carried out yet.
        Raises ValueError for places that do not fit.
        """
        ...
