"""The beginning of each step of a group: what its ranks compute in it, and whether they go on with other places."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.experts import LocalExperts, SpreadExperts
from kernels.group import Group
from kernels.grouping import Regrouping
from kernels.model import Model
from kernels.places import Places, check_places, near_places

AHEAD = 2
"""Layers whose weights are there twice, at most."""


class _Plan:
    """Other places for each layer, and how far they are taken over."""

    def __init__(self, version: int, places: Sequence[Places]) -> None:
        self.version, self.places = version, list(places)
        digest = hashlib.sha256(str(version).encode() + b"".join(one.tobytes() for one in places)).digest()
        self.digest = int.from_bytes(digest[:7], "big")
        self.loaded: deque[LocalExperts] = deque()
        self.num_loaded = self.num_switched = 0


class Agreed(NamedTuple):
    """Which passes some rank has rows for: the others serve in those."""

    drafts: bool
    rows: bool


class Lockstep:
    """A word of each rank at the beginning of each step. Without a group a rank agrees with itself.

    New places of experts are taken over layer by layer: the weights of a layer are loaded aside (`load_next`, from
    another thread), and the step at whose beginning every rank has them is the first with them, on all ranks.
    """

    def __init__(self, group: Group | None, model: Model) -> None:
        self._group = group
        self.layers = [moe.experts for moe in model.moes if isinstance(moe.experts, SpreadExperts)]
        """Those of the backbone, then draft stages; none without a group."""
        self.num_steps = 0
        self.is_awake = False
        """Whether some rank had requests in the last step, and may go on with them in the next one."""
        self.version = 0
        """Of the places that all layers have."""
        self.is_called_off = False
        """Whether all ranks are to leave the group at the next step."""
        self._plan: _Plan | None = None

    def renew(self) -> None:
        """The ranks have met: every expert gets a place near to where it is, and what is missing here is read.

        Raises GroupError when a rank is gone.
        """
        assert self._group is not None
        self._plan, self.num_steps, self.version, self.is_awake, self.is_called_off = None, 0, 0, False, False
        for layer in self.layers:
            said = self._group.agree(layer.held + [-1] * (layer.num_experts - len(layer.held)))
            held = [row[row >= 0].tolist() for row in said]
            places = near_places(held, layer.num_experts, self._group.num_redundant)
            layer.switch(places, layer.load(places[self._group.rank].tolist()))

    def begin(self, *, is_busy: bool, drafts: bool, rows: bool) -> Agreed:
        """Tell the others, and hear from them, whether there are requests, and rows for which passes.

        Raises GroupError when a rank is gone, Regrouping when one has called the group off.
        """
        if self._group is None:
            return Agreed(drafts, rows)
        plan = self._plan
        planned = (plan.digest, plan.num_loaded) if plan else (0, 0)
        said = self._group.agree([is_busy, drafts, rows, self.is_called_off, *planned])
        self.num_steps += 1
        self.is_awake, any_drafts, any_rows, is_called_off = (bool(column.any()) for column in said[:, :4].T)
        if is_called_off:
            raise Regrouping(f"rank {self._group.rank} of {self._group.size}: all leave to meet others")
        self._switch(said[:, 4:])
        return Agreed(any_drafts, any_rows)

    @property
    def num_ahead(self) -> int:
        """Layers that are loaded, and wait for the other ranks."""
        plan = self._plan
        return plan.num_loaded - plan.num_switched if plan else 0

    def rearrange(self, version: int, places: Sequence[Places]) -> None:
        """Plan other places for each of `layers`, between steps, in place of an earlier plan that is not carried out.

        A version that is not newer than both changes nothing. Raises ValueError for places that do not fit.
        """
        if version <= max(self.version, self._plan.version if self._plan else 0):
            return
        if len(places) != len(self.layers):
            raise ValueError(f"places of {len(places)} layers, there are {len(self.layers)}")
        for one, layer in zip(places, self.layers, strict=True):
            if one.shape != layer.places.shape:
                raise ValueError(f"places of shape {one.shape}, there are {layer.places.shape}")
            check_places(one, layer.num_experts)
        self._plan = _Plan(version, places)

    def load_next(self) -> bool:
        """Load the weights of the next layer of the plan, from one thread; False when there is none, or enough are
        loaded that wait for other ranks. Safe beside all others."""
        plan = self._plan
        if self._group is None or plan is None or plan.num_loaded == len(self.layers) or self.num_ahead >= AHEAD:
            return False
        layer, places = self.layers[plan.num_loaded], plan.places[plan.num_loaded]
        plan.loaded.append(layer.load(places[self._group.rank].tolist()))
        plan.num_loaded += 1  # last: from here on it is switched to
        return True

    def _switch(self, said: npt.NDArray[np.int64]) -> None:
        """Take over what all ranks have loaded of the same plan: [ranks, (digest, layers loaded)]."""
        plan = self._plan
        if plan is None or not np.all(said[:, 0] == plan.digest):
            return
        while plan.num_switched < int(said[:, 1].min()):
            self.layers[plan.num_switched].switch(plan.places[plan.num_switched], plan.loaded.popleft())
            plan.num_switched += 1
        if plan.num_switched == len(self.layers):
            self.version, self._plan = plan.version, None
