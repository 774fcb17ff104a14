"""The routed experts of a layer (spec §2.4): all of them here, or spread over the ranks of a group (design §5)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kernels.checkpoint import Checkpoint
from kernels.config import ConfigError, LayerRole, ModelConfig
from kernels.group import Group
from kernels.ops.experts import Fp4Weights, Routes, add_picks, run_experts, run_fp4_experts
from kernels.ops.linear import by_columns
from kernels.ops.quant import fp8_qdq
from kernels.ops.rounding import Rounding, keep
from kernels.places import Places, first_places


class Experts(Protocol):
    """What a layer asks of its experts."""

    reads_fp8: bool

    @property
    def num_bytes(self) -> int:
        """Of the weights, as they are held here."""
        ...

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, dim] as `run` wants it; with `reads_fp8` quantised, as other FP8 products may read it too."""
        ...

    def run(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """The sum of the picked experts' outputs for prepared `x` [rows, dim], added in pick order, in FP32."""
        ...

    def serve(self) -> None:
        """Take part in a `run` of other ranks with no rows of one's own."""
        ...


def load_experts(
    config: ModelConfig, role: LayerRole, checkpoint: Checkpoint, rounding: Rounding, group: Group | None
) -> LocalExperts | SpreadExperts:
    """All experts of a layer, or this rank's share of them. Raises ConfigError when they cannot be shared so."""

    def load(experts: Sequence[int]) -> LocalExperts:
        return LocalExperts(config, role, checkpoint, rounding, experts)

    if group is None:
        return load(range(role.num_experts))
    try:
        places = first_places(role.num_experts, group.size, group.num_redundant)
    except ValueError as error:
        raise ConfigError(f"{role.name}: {error}") from None
    return SpreadExperts(group, load, places[group.rank].tolist(), role.num_experts, config.hidden_size)


class LocalExperts:
    """The weights of some experts, each at its place; `routes` name places."""

    def __init__(
        self, config: ModelConfig, role: LayerRole, checkpoint: Checkpoint, rounding: Rounding, experts: Sequence[int]
    ) -> None:
        """Reads the weights of `experts` and touches no others."""
        self._round, self._limit = rounding, config.swiglu_limit
        names = [f"{role.name}.ffn.experts.{expert}" for expert in experts]
        up = checkpoint.experts(names, ("w1", "w3"), config.moe_intermediate_size, config.hidden_size)
        down = checkpoint.experts(names, ("w2",), config.hidden_size, config.moe_intermediate_size)
        self.up, self.down = (
            weight.values if isinstance(weight.values, Fp4Weights) else by_columns(weight.fp32) for weight in (up, down)
        )
        self.quantize = fp8_qdq if up.quantized else keep
        self.reads_fp8 = up.quantized and isinstance(self.up, torch.Tensor)

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        return self.quantize(x) if self.reads_fp8 else x

    def run(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        if isinstance(self.up, torch.Tensor) and isinstance(self.down, torch.Tensor):
            return run_experts(x, routes, self.up, self.down, self._limit, self._round, self.quantize)
        assert isinstance(self.up, Fp4Weights) and isinstance(self.down, Fp4Weights)
        return run_fp4_experts(x, routes, self.up, self.down, self._limit, self._round)

    def serve(self) -> None:
        """Nobody else is asked."""

    def joined(self, other: LocalExperts, order: Sequence[int]) -> LocalExperts:
        """Those of both, ours first, in another `order`."""
        found = copy.copy(self)
        found.up, found.down = _joined(self.up, other.up, order), _joined(self.down, other.down, order)
        return found

    @property
    def num_bytes(self) -> int:
        parts = [one for part in (self.up, self.down) for one in (part if isinstance(part, Fp4Weights) else (part,))]
        return sum(part.nbytes for part in parts)


def _joined(
    ours: torch.Tensor | Fp4Weights, other: torch.Tensor | Fp4Weights, order: Sequence[int]
) -> torch.Tensor | Fp4Weights:
    if isinstance(ours, Fp4Weights) and isinstance(other, Fp4Weights):
        codes, scale = (torch.cat(pair)[list(order)] for pair in zip(ours, other, strict=True))
        return Fp4Weights(codes, scale)
    assert isinstance(ours, torch.Tensor) and isinstance(other, torch.Tensor)  # of one layer
    return by_columns(torch.cat((ours, other))[list(order)])


class SpreadExperts:
    """The experts of a layer over the ranks of a group: each row goes to where its experts are, and comes back.

    Before the ranks have met it has its own experts only, and no places.

    The same bits as with all experts here, whatever the places: products are those of one row, and a row's picks are
    added where the row is, in pick order (design §5). Every rank has to `run` or to `serve` at the same time.
    """

    def __init__(
        self,
        group: Group,
        load: Callable[[Sequence[int]], LocalExperts],
        held: Sequence[int],
        num_experts: int,
        dim: int,
    ) -> None:
        self._group, self._load, self._dim = group, load, dim
        self.num_experts = num_experts
        self.used = np.zeros(num_experts, dtype=np.int64)
        """Rows of this rank that went to each expert, ever."""
        self.held = list(held)
        """The experts that are here, in the order of their weights."""
        self.local = load(held)
        self.reads_fp8 = self.local.reads_fp8

    def load(self, wanted: Sequence[int]) -> LocalExperts:
        """What would be here with other experts: those that are here already are not read again."""
        here, wanted = self.held, list(wanted)
        if wanted == here:  # a plan leaves most layers as they are
            return self.local
        missing = [expert for expert in wanted if expert not in here]
        known = [*here, *missing]
        other = self._load(missing) if missing else self.local
        return self.local.joined(other, [known.index(expert) for expert in wanted])

    def switch(self, places: Places, local: LocalExperts) -> None:
        """Go on with these `places`, of which `load` made `local`; at the same step on all ranks."""
        self.places, self.local, self.held = places, local, places[self._group.rank].tolist()
        device = self._group.device
        where: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(places.ravel().tolist()):
            where[expert].append(place)
        most = max(map(len, where))
        self._copies = torch.tensor([len(found) for found in where], device=device)
        self._where = torch.tensor([found + [0] * (most - len(found)) for found in where], device=device)

    @property
    def num_bytes(self) -> int:
        return self.local.num_bytes

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        return self.local.prepare(x)

    def run(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        num_rows, num_picks = routes.experts.shape
        flat = routes.experts.flatten()
        self.used += np.bincount(flat.cpu().numpy(), minlength=self.num_experts)
        row = torch.arange(num_rows, device=x.device).repeat_interleave(num_picks)
        # Rows take turns at the copies of an expert, and ranks begin with different ones.
        place = self._where[flat, (row + self._group.rank) % self._copies[flat]]
        rank = torch.div(place, self.places.shape[1], rounding_mode="floor")
        order = rank.argsort(stable=True)
        sent = torch.cat(
            (
                x[row[order]],
                (place % self.places.shape[1])[order].unsqueeze(1).to(torch.float32),
                routes.weights.flatten()[order].unsqueeze(1),
            ),
            1,
        )
        out = torch.empty(len(flat), self._dim, device=x.device)
        out[order] = self._group.ask(sent, torch.bincount(rank, minlength=self._group.size), self._answer)
        return add_picks(out.view(num_rows, num_picks, self._dim))

    def serve(self) -> None:
        nothing = torch.empty(0, self._dim + 2, device=self._group.device)
        counts = torch.zeros(self._group.size, dtype=torch.int64, device=self._group.device)
        self._group.ask(nothing, counts, self._answer)

    def _answer(self, received: torch.Tensor) -> torch.Tensor:
        """`received` [routes, dim + 2]: rows, the place of each here, and its weight -> [routes, dim]."""
        x, place, weight = received[:, : self._dim], received[:, self._dim, None], received[:, self._dim + 1 :]
        if not len(x):
            return x
        return self.local.run(x.contiguous(), Routes(place.to(torch.int64), weight.contiguous()))
