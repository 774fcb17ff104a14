"""Where the experts of a layer are in a group: as many places on each rank, some experts at several. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
"""[ranks, places]: the expert at each place of each rank; every expert at one place or more, never twice on a rank."""


def num_redundant(num_experts: int, num_ranks: int, at_least: int) -> int:
    """How many places there are beyond one for each expert: the fewest, `at_least` or more, that give every rank the
    same number (spec/serving.md K4, EPLB). It also fixes the layout when the number of ranks changes.

    Raises ValueError when a rank would need two copies of an expert.
    """
    if num_experts < 1 or num_ranks < 1 or at_least < 0:
        raise ValueError(f"{num_experts} experts and {at_least} more on {num_ranks} ranks")
    extra = at_least + -(num_experts + at_least) % num_ranks
    if extra > num_experts * (num_ranks - 1):
        raise ValueError(
            f"{num_experts} experts and {at_least} copies do not go to {num_ranks} ranks: a rank would hold one twice"
        )
    return extra


def first_places(num_experts: int, num_ranks: int, at_least: int) -> Places:
    """Experts in their order, then as many copies as `num_redundant` says, cut into ranks. Raises ValueError."""
    total = num_experts + num_redundant(num_experts, num_ranks, at_least)
    return (np.arange(total, dtype=np.int64) % num_experts).reshape(num_ranks, -1)


def near_places(held: Sequence[Sequence[int]], num_experts: int, at_least: int) -> Places:
    """Places for ranks that have met, of what each has `held` so far: as little as can be is to be loaded.

    As many copies as `num_redundant` says, or one on each rank where there are too few ranks for those. Each expert
    first: those that fewest hold go first, to the rank of them with the most room. Then copies of what is held already.
    What stays on a rank keeps its order. The same on all ranks, as it depends on the arguments only.
    """
    num_ranks = len(held)
    at_least = min(at_least, num_experts * (num_ranks - 1))
    per_rank = (num_experts + num_redundant(num_experts, num_ranks, at_least)) // num_ranks
    holders: list[list[int]] = [[] for _ in range(num_experts)]
    for rank, row in enumerate(held):
        for expert in row:
            holders[expert].append(rank)
    given: list[set[int]] = [set() for _ in held]
    num_copies = np.ones(num_experts, dtype=np.int64)

    def room(rank: int) -> int:
        return per_rank - len(given[rank])

    homeless = []
    for expert in sorted(range(num_experts), key=lambda expert: len(holders[expert])):
        if ranks := [rank for rank in holders[expert] if room(rank)]:
            given[max(ranks, key=room)].add(expert)
        else:
            homeless.append(expert)
    for expert in homeless:
        given[max(range(num_ranks), key=room)].add(expert)
    for row, mine in zip(held, given, strict=True):
        more = [expert for expert in row if expert not in mine] + list(range(num_experts))
        more.sort(key=lambda expert: (expert not in row, num_copies[expert]))
        for expert in more:
            if len(mine) == per_rank:
                break
            num_copies[expert] += expert not in mine
            mine.add(expert)
    kept = [[expert for expert in row if expert in mine] for row, mine in zip(held, given, strict=True)]
    return np.array(
        [row + sorted(mine.difference(row)) for row, mine in zip(kept, given, strict=True)], dtype=np.int64
    )


def check_places(places: Places, num_experts: int) -> None:
    """Raises ValueError when an expert has no place, or two on one rank."""
    if not np.array_equal(np.unique(places), np.arange(num_experts)):
        raise ValueError(f"of {num_experts} experts these are placed: {np.unique(places).tolist()}")
    for rank, row in enumerate(places.tolist()):
        if len(set(row)) != len(row):
            raise ValueError(f"rank {rank} would hold an expert twice: {row}")
