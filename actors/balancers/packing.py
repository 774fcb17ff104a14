"""Which rank holds which copies: as many on each, no expert twice on one, and no rank that the others wait for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actors.balancers.copies import Ints, Loads

Floats = NDArray[np.float64]

MAX_SWAPS = 64
NUM_TRIED = 4
"""Of the ranks that others wait for, how many are looked at for one that a swap makes lighter."""

NUM_AT_ONCE = 64
"""Swaps that are looked at in full before it is asked whether one of the others may still be better."""

LEAST_GAIN = 1e-4
LEAST_GAIN_HELD = 3e-4
"""A swap that lowers the sum by a smaller part is not done; the second where it means that two ranks load an expert."""


def pack(loads: Loads, copies: Ints, ep_size: int, held: NDArray[np.bool_] | None = None) -> Ints:
    """The expert in each slot, `[ep_size, slots_per_rank]`: `copies[e]` ranks hold expert e, none holds it twice.

    A copy computes an even share of its expert's tokens. What is made small is the sum over the steps of the most
    loaded rank's load (spec/serving.md K4, EPLB). Greedy: experts in descending load per copy, each copy to the rank
    with room and without that expert that raises the sum least, among equals the least loaded. Then swaps between a
    rank that others wait for and any other, the best first, as long as they lower the sum.

    With `held [ep_size, experts]`, who has which now, as much stays as can: superfluous copies go, from the most
    loaded rank first, what is missing is placed as above, and only swaps that gain more move anything else. No rank
    may have more than its slots.

    Raises ValueError when the copies do not fill the ranks alike, or an expert has none or more than there are ranks.
    """
    if copies.sum() % ep_size or copies.min() < 1 or copies.max() > ep_size:
        raise ValueError(f"{copies.min()} to {copies.max()} copies, {copies.sum()} together, on {ep_size} ranks")
    least_gain = LEAST_GAIN if held is None else LEAST_GAIN_HELD
    ranks = _Ranks(np.ascontiguousarray((loads / copies).T), ep_size, int(copies.sum()) // ep_size)
    if held is not None:
        ranks.holds |= held
        ranks.loads += held @ ranks.shares
    missing = copies - ranks.holds.sum(axis=0)
    for expert in np.flatnonzero(missing < 0):
        for _ in range(-missing[expert]):
            holders = np.flatnonzero(ranks.holds[:, expert])
            ranks.take(holders[ranks.loads[holders].sum(axis=1).argmax()], expert)
    for expert in np.argsort(-ranks.shares.sum(axis=1), kind="stable"):
        for _ in range(missing[expert]):
            ranks.place(expert)
    for _ in range(MAX_SWAPS):
        if not ranks.swap(least_gain):
            break
    return np.nonzero(ranks.holds)[1].reshape(ep_size, -1)


class _Ranks:
    """A placement in the making: which experts each rank holds, and its load in each step."""

    def __init__(self, shares: Floats, num_ranks: int, num_slots: int) -> None:
        self.shares = shares  # of one copy, [experts, steps]
        self.num_slots = num_slots
        self.holds = np.zeros((num_ranks, len(shares)), np.bool_)
        self.loads = np.zeros((num_ranks, shares.shape[1]))

    def put(self, rank: np.intp, expert: np.intp) -> None:
        self.holds[rank, expert] = True
        self.loads[rank] += self.shares[expert]

    def take(self, rank: np.intp, expert: np.intp) -> None:
        self.holds[rank, expert] = False
        self.loads[rank] -= self.shares[expert]

    def place(self, expert: np.intp) -> None:
        """One more copy of an expert that some rank does not hold yet, while some rank has room.

        When only ranks that hold it have room, another gives one up for it. There always is one: a full rank q has
        as many experts as slots, and without this one; a rank p with room has at least two fewer besides it. So q
        has one that p has not.
        """
        room = self.holds.sum(axis=1) < self.num_slots
        lacks = ~self.holds[:, expert]
        totals = self.loads.sum(axis=1)
        most = self.loads.max(axis=0)
        open_ = np.flatnonzero(room & lacks)
        if len(open_):
            sums = np.maximum(most, self.loads[open_] + self.shares[expert]).sum(axis=1)
            self.put(open_[np.lexsort((totals[open_], sums))[0]], expert)
            return
        taker = np.where(room, totals, np.inf).argmin()
        giver = np.where(lacks, totals, np.inf).argmin()
        given = np.flatnonzero(self.holds[giver] & ~self.holds[taker])
        shares = self.shares[given]
        both = np.maximum(self.loads[taker] + shares, self.loads[giver] - shares + self.shares[expert])
        moved = given[np.maximum(most, both).sum(axis=1).argmin()]
        self.take(giver, moved)
        self.put(taker, moved)
        self.put(giver, expert)

    def swap(self, least_gain: float) -> bool:
        """Swaps two copies to lower the sum by that part or more, one of them on a rank that others wait for. False
        when none does."""
        if len(self.loads) == 1:
            return False
        two = np.partition(self.loads, -2, axis=0)[-2:]
        waits = np.bincount(self.loads.argmax(axis=0), two[1] - two[0], len(self.loads))
        for hot in np.argsort(-waits, kind="stable")[:NUM_TRIED]:
            best = self._best_swap(hot, least_gain)
            if best is not None:
                expert, rank, other = best
                self.take(hot, expert)
                self.take(rank, other)
                self.put(hot, other)
                self.put(rank, expert)
                return True
        return False

    def _best_swap(self, hot: np.intp, least_gain: float) -> tuple[np.intp, np.intp, np.intp] | None:
        """Which expert of `hot` to swap with which rank's which, or None when no swap is worth it."""
        others = self.loads.copy()
        others[hot] = -1.0
        first = others.argmax(axis=0)
        second = np.partition(others, -2, axis=0)[-2]
        most = others.max(axis=0)
        rest = np.repeat(most[None], len(others), axis=0)  # of the ranks but hot and each, [ranks, steps]
        rest[first, np.arange(len(first))] = second
        mine = np.flatnonzero(self.holds[hot])
        ranks, experts = np.nonzero(self.holds & ~self.holds[hot])
        ranks, experts = ranks[ranks != hot], experts[ranks != hot]
        given, at = np.nonzero(~self.holds[ranks][:, mine].T)
        given, ranks, experts = mine[given], ranks[at], experts[at]

        def sums(some: Ints | slice, steps: NDArray[np.bool_] | slice) -> Floats:
            """What these swaps make of these steps."""
            shares = self.shares[:, steps]
            moved = shares[experts[some]] - shares[given[some]]
            there = self.loads[:, steps][ranks[some]] - moved
            moved += self.loads[hot, steps]
            np.maximum(moved, there, out=moved)
            np.maximum(moved, rest[:, steps][ranks[some]], out=moved)
            return np.asarray(moved.sum(axis=1))

        # No swap makes a step shorter than what the ranks but these two take: that is the bound for steps that do not
        # wait for `hot`, so that the others, which are few, tell which swaps to look at in full.
        waiting = self.loads[hot] > most
        bounds = sums(slice(None), waiting) + rest[:, ~waiting].sum(axis=1)[ranks]
        least, best = self.loads.max(axis=0).sum() * (1.0 - least_gain), None
        order = bounds.argsort(kind="stable")
        for start in range(0, len(order), NUM_AT_ONCE):
            some = order[start : start + NUM_AT_ONCE]
            if bounds[some[0]] >= least:
                break
            found = sums(some, slice(None))
            if found.min() < least:
                one = some[found.argmin()]
                least, best = found.min(), (given[one], ranks[one], experts[one])
        return best
