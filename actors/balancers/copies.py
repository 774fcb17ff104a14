"""How many copies of each expert: as many slots as the group has, the experts that hold all others up first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64] | NDArray[np.int64]
"""Tokens routed to each expert in each of the recent steps, `[steps, experts]`, none negative."""

Ints = NDArray[np.int64]


def replicate(loads: Loads, num_slots: int, ep_size: int) -> Ints:
    """How many copies of each expert, `[experts]`: at least one, at most `ep_size`, `num_slots` together.

    A step ends when its most loaded copy is computed, so what is made small is the sum over the steps of the largest
    load / copies, not the load of the whole window: an expert that is hot in few steps costs as much in these
    (spec/serving.md K4, EPLB). Greedy: the next copy is of the expert whose copy lowers that sum most. Among equals,
    as when two experts lead every step together, of the one with the greatest load per copy, then the fewest copies,
    then the lowest id. A copy lowers only what its expert leads, down to the second of that step: so the two first
    of each step are kept, and found anew only where one of them got a copy.

    Raises ValueError when so many slots cannot be given out.
    """
    num_steps, num_experts = loads.shape
    if not num_experts <= num_slots <= num_experts * ep_size:
        raise ValueError(f"{num_slots} slots for {num_experts} experts on {ep_size} ranks")
    copies = np.ones(num_experts, np.int64)
    shares = loads.astype(np.float64)
    totals = shares.sum(axis=0)
    steps = np.arange(num_steps)
    first, second = _two_first(shares)
    for _ in range(num_slots - num_experts):
        most = shares[steps, first]
        then = np.maximum(shares[steps, second], loads[steps, first] / (copies[first] + 1))
        gains = np.bincount(first, most - then, num_experts)
        gains[copies == ep_size] = -1.0
        equal = np.flatnonzero(gains == gains.max())
        expert = equal[np.lexsort((copies[equal], -totals[equal] / copies[equal]))[0]]
        copies[expert] += 1
        shares[:, expert] = loads[:, expert] / copies[expert]
        changed = np.flatnonzero((first == expert) | (second == expert))
        first[changed], second[changed] = _two_first(shares[changed])
    return copies


def _two_first(values: NDArray[np.float64]) -> tuple[Ints, Ints]:
    """Where the largest and the next of each row are, `[rows]` each; twice the same when there is one column."""
    rows = np.arange(len(values))
    rest = values.copy()
    first = rest.argmax(axis=1)
    rest[rows, first] = -1.0
    return first, rest.argmax(axis=1)
