"""Where the experts of a layer are, what must move to change it, and when that pays (spec/serving.md K4, EPLB)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from actors.balancers.assignment import assign
from actors.balancers.copies import Ints, Loads, replicate
from actors.balancers.packing import pack
from kernels.places import first_places, num_redundant

MIN_GAIN = 0.05
"""A layer is changed when its most loaded rank has at least this part less to compute: experts that move take the
network and the memory bandwidth that tokens want. From new it is packed when that is as much better than what a few
moves give: it moves most of the copies, those a quarter."""

Slots = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Placement:
    """The experts of one layer: `slots[rank][slot]` is an expert's id, `[ep_size][slots_per_rank]`.

    Every id from 0 on has a slot, all ranks have as many, and none holds an expert twice; ValueError otherwise.
    """

    slots: Slots

    def __post_init__(self) -> None:
        if len({len(row) for row in self.slots}) != 1 or any(len(set(row)) < len(row) for row in self.slots):
            raise ValueError("ranks of a placement have equally many slots, with different experts")
        experts = {expert for row in self.slots for expert in row}
        if not experts or experts != set(range(len(experts))):
            raise ValueError("every expert of a placement has a slot")

    @classmethod
    def contiguous(cls, num_experts: int, ep_size: int, at_least: int) -> Placement:
        """What a group starts with, before loads are known: experts in their order, the superfluous slots for the
        first ones again. Raises ValueError as `num_redundant`."""
        return _placement(first_places(num_experts, ep_size, at_least))

    @cached_property
    def copies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Where the copies of each expert are: `copies[expert]` are its (rank, slot), by rank. For a dispatcher."""
        places: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(max(row) for row in self.slots))]
        for rank, row in enumerate(self.slots):
            for slot, expert in enumerate(row):
                places[expert].append((rank, slot))
        return tuple(tuple(of_expert) for of_expert in places)

    def balance(self, loads: Loads) -> float:
        """How many times the mean a step waits for: the mean over the steps of max / mean rank load, 1 at best.

        `loads [steps, experts]`; an expert's tokens are shared evenly by its copies. Steps without any do not count,
        and without any step it is 1. Raises ValueError when there are not as many experts here.
        """
        if loads.shape[1] != len(self.copies):
            raise ValueError(f"loads of {loads.shape[1]} experts, a placement of {len(self.copies)}")
        shares = loads / np.array([len(of_expert) for of_expert in self.copies])
        ranks = np.stack([shares[:, row].sum(axis=1) for row in self.slots], axis=1)
        ranks = ranks[ranks.sum(axis=1) > 0]
        return float((ranks.max(axis=1) / ranks.mean(axis=1)).mean()) if len(ranks) else 1.0


def settle(old: Placement, new: Placement, num_nodes: int = 1) -> Placement:
    """`new` with its slots and ranks renamed so that as few slots as possible hold another expert than in `old`.

    To whom a row of slots belongs makes no difference to the load, so it goes where most of it is, exactly the best
    for all rows together (an assignment), and what a rank held stays in its slot. With nodes, which are runs of
    ranks, whole nodes are exchanged, and ranks within one. Raises ValueError when they are not of one size.
    """
    _same_size(old, new)
    common = np.array([[len(set(row) & set(other)) for other in new.slots] for row in old.slots])
    per = len(common) // num_nodes
    whose = np.zeros((num_nodes, num_nodes, per), np.int64)  # for each old node and new one: the new rank of each old
    kept = np.zeros((num_nodes, num_nodes), np.int64)
    for pair in np.ndindex(num_nodes, num_nodes):
        first, other = pair[0] * per, pair[1] * per
        inside = common[first : first + per, other : other + per]
        whose[pair] = other + assign(inside)
        kept[pair] = inside[range(per), whose[pair] - other].sum()
    ranks = whose[range(num_nodes), assign(kept)].reshape(-1)
    return Placement(tuple(_in_place(row, new.slots[rank]) for row, rank in zip(old.slots, ranks, strict=True)))


def _in_place(held: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted` with what is held in its slot, and the rest in the others."""
    rest = iter([expert for expert in wanted if expert not in held])
    return tuple(expert if expert in wanted else next(rest) for expert in held)


def moves(old: Placement, new: Placement) -> list[tuple[int, int, int]]:
    """What must be loaded to get from one to the other: (rank, slot, expert), by rank and slot.

    Never an expert that its rank holds already: raises ValueError when it holds it in another slot, as only `settle`
    puts it there, and when they are not of one size.
    """
    _same_size(old, new)
    found = []
    for rank, (held, wanted) in enumerate(zip(old.slots, new.slots, strict=True)):
        for slot, expert in enumerate(wanted):
            if expert != held[slot]:
                if expert in held:
                    raise ValueError(f"rank {rank} holds expert {expert} in another slot: settle the placement first")
                found.append((rank, slot, expert))
    return found


@dataclass(frozen=True)
class Plan:
    """What `plan` advises, one of each per layer: the placement (the old one itself where it stays), and max / mean
    rank load in the window that was looked at, as it was and as it would have been."""

    placements: tuple[Placement, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


def plan(loads: Loads, old: Sequence[Placement], ep_size: int, at_least: int, num_nodes: int = 1) -> Plan:
    """New placements for all layers, after `loads [layers, steps, experts]` of a window of recent steps.

    `at_least` copies are superfluous in each layer (`num_redundant`). A layer stays as it is when the change would
    gain less than `MIN_GAIN`, but where it is of another size. It is settled on the old one.

    With nodes (runs of equally many ranks) the copies of an expert are all on one: experts are given to nodes first,
    equally many to each and for equal load, then replicated and packed within. A row that is sent once to each node
    it needs then reaches any copy there, and copies come over the node's own links. V4.1 routes without groups, so
    any expert may be on any node: each is a group of one. The price: a node has at least the load of the hottest
    expert, however many copies it gets. Where experts or ranks cannot be divided so, placement is global.

    Raises ValueError when loads are negative, not finite, or of other layers or experts; otherwise as `num_redundant`.
    """
    if loads.ndim != 3 or len(loads) != len(old) or not np.isfinite(loads).all() or (loads < 0).any():
        raise ValueError(f"{len(old)} layers need loads [layers, steps, experts], none negative")
    num_experts = loads.shape[2]
    per_rank = (num_experts + num_redundant(num_experts, ep_size, at_least)) // ep_size
    if num_experts % num_nodes or ep_size % num_nodes or per_rank > num_experts // num_nodes:
        num_nodes = 1
    before = [placement.balance(of_layer) for of_layer, placement in zip(loads, old, strict=True)]
    advised = [_change(*layer, (ep_size, per_rank), num_nodes) for layer in zip(loads, old, strict=True)]
    after = [placement.balance(of_layer) for of_layer, placement in zip(loads, advised, strict=True)]
    return Plan(tuple(advised), tuple(before), tuple(after))


def _change(loads: Loads, old: Placement, size: tuple[int, int], num_nodes: int) -> Placement:
    """What one layer should become, the old placement itself when nothing is gained.

    Balance is never below 1: a layer that is nearly even is not packed, nor one packed anew that few moves make so.
    """
    held, worth = np.array(old.slots), 1 - MIN_GAIN
    if held.shape != size:
        return _placement(_arrange(loads, size, num_nodes))
    if (most := old.balance(loads) * worth) < 1:
        return old
    best = settle(old, _placement(_arrange(loads, size, num_nodes, held)), num_nodes)
    if (near := best.balance(loads) * worth) > 1:
        fresh = settle(old, _placement(_arrange(loads, size, num_nodes)), num_nodes)
        best = fresh if fresh.balance(loads) < near else best
    return best if best.balance(loads) <= most else old


def _arrange(loads: Loads, size: tuple[int, int], num_nodes: int, old: Ints | None = None) -> Ints:
    """The expert in each slot, `size`: replicated and packed, node by node if there are several. With `old` slots, as
    much of them as can stay; a node's experts do if they were on it alone, and as many on each."""
    (ep_size, per_rank), num_experts = size, loads.shape[1]
    per_node = ep_size // num_nodes
    held: NDArray[np.bool_] | None = None
    homes: NDArray[np.bool_] | None = None
    if old is not None:
        held = np.zeros((ep_size, num_experts), np.bool_)
        np.put_along_axis(held, old, True, axis=1)
        on_node: NDArray[np.bool_] = held.reshape(num_nodes, per_node, num_experts).max(axis=1)
        if (on_node.sum(axis=1) * num_nodes == num_experts).all():
            homes = on_node
    rows = []
    for node, experts in enumerate(pack(loads, np.ones(num_experts, np.int64), num_nodes, homes)):
        inside = None if held is None else held[node * per_node : (node + 1) * per_node, experts]
        copies = replicate(loads[:, experts], per_node * per_rank, per_node)
        rows.append(experts[pack(loads[:, experts], copies, per_node, inside)])
    return np.concatenate(rows)


def _placement(slots: Ints) -> Placement:
    return Placement(tuple(tuple(int(expert) for expert in row) for row in slots))


def _same_size(old: Placement, new: Placement) -> None:
    was, is_ = np.array(old.slots).shape, np.array(new.slots).shape
    if was != is_:
        raise ValueError(f"ranks and slots of each were {was}, are {is_}")
