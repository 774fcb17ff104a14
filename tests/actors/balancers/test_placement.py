"""Placement of experts: hand-worked cases, what always holds, and how even it makes skewed loads."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from actors.balancers import packing
from actors.balancers.copies import replicate
from actors.balancers.packing import pack
from actors.balancers.placement import Placement, Plan, moves, plan, settle
from kernels.places import num_redundant

Ints = NDArray[np.int64]


def waits(slots: Ints, loads: Ints) -> float:
    """What packing makes small: the sum over the steps of the most loaded rank's load."""
    shares = loads / np.bincount(slots.ravel())
    return float(shares[:, slots].sum(axis=2).max(axis=1).sum())


def placed(slots: Ints) -> Placement:
    return Placement(tuple(tuple(int(expert) for expert in row) for row in slots))


def by_mean(loads: Ints, num_slots: int, ep_size: int) -> Ints:
    """The published greedy, of the window's mean: a copy to the greatest load / copies, then the heaviest first to the
    lightest rank with room. It may put two copies on one rank."""
    weights = loads.mean(axis=0)
    copies = np.ones(len(weights), np.int64)
    for _ in range(num_slots - len(weights)):
        copies[(weights / copies).argmax()] += 1
    rows: list[list[int]] = [[] for _ in range(ep_size)]
    shares = weights / copies
    for expert in np.repeat(np.arange(len(weights)), copies)[np.argsort(-np.repeat(shares, copies), kind="stable")]:
        room = [row for row in rows if len(row) < num_slots // ep_size]
        min(room, key=lambda row: float(shares[row].sum())).append(int(expert))
    return np.array(rows)


def zipf(num_experts: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """How likely each expert is, exponent 1 in some order; none more than one token in six of its choices."""
    chances = np.minimum(1 / np.arange(1, num_experts + 1) / sum(1 / np.arange(1, num_experts + 1)), 1 / 6)
    return rng.permutation(chances / chances.sum())


# --- how many copies


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "at_least", "extra"),
    [(384, 64, 32, 64), (384, 128, 32, 128), (384, 64, 0, 0), (256, 144, 32, 32), (8, 3, 0, 1), (1, 4, 0, 3)],
)
def test_the_fewest_that_divide(num_experts: int, ep_size: int, at_least: int, extra: int) -> None:
    assert num_redundant(num_experts, ep_size, at_least) == extra


@pytest.mark.parametrize(("num_experts", "ep_size", "at_least"), [(8, 1, 1), (2, 4, 7), (0, 4, 4), (8, 2, -1)])
def test_no_more_than_one_of_each_on_every_rank(num_experts: int, ep_size: int, at_least: int) -> None:
    with pytest.raises(ValueError, match="ranks"):
        num_redundant(num_experts, ep_size, at_least)


def test_a_copy_for_whom_the_steps_wait() -> None:
    """One more copy. Expert 0 has most, 12, expert 1 only 10, but all in one step. Steps wait for 10 + 6; with two of
    expert 0 for 10 + 3, with two of expert 1 for 6 + 6."""
    loads = np.array([[6, 10, 1], [6, 0, 1]])
    assert replicate(loads, 4, 2).tolist() == [1, 2, 1]
    assert np.bincount(by_mean(loads, 4, 2).ravel()).tolist() == [2, 1, 1]


def test_the_second_of_a_step_is_whom_a_copy_can_lower_it_to() -> None:
    """Expert 1 gets a copy for the second step (20 to 10). So the first step can be lowered from 10 only to 7, not to
    5: the next copy is expert 1's again, from 10 to 6.7."""
    assert replicate(np.array([[10, 8, 7], [0, 20, 0]]), 5, 3).tolist() == [1, 3, 1]


def test_a_copy_among_equals() -> None:
    """Two lead every step, so one copy helps nobody: the greater load per copy first, then the lower id; no more
    copies than ranks; and with no load at all, one each in turn."""
    assert replicate(np.array([[4, 6, 6]]), 4, 3).tolist() == [1, 2, 1]
    assert replicate(np.array([[4, 6, 6]]), 5, 3).tolist() == [1, 2, 2]
    assert replicate(np.array([[90, 6, 6]]), 5, 2).tolist() == [2, 2, 1]
    assert replicate(np.zeros((2, 3), np.int64), 5, 3).tolist() == [2, 2, 1]
    with pytest.raises(ValueError, match="7 slots for 3 experts on 2"):
        replicate(np.zeros((2, 3)), 7, 2)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Ranks, slots on each, experts."""
    ep_size, num_slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return ep_size, num_slots, draw(st.integers(num_slots, ep_size * num_slots))


def random_loads(seed: int, num_steps: int, num_experts: int) -> Ints:
    """Skewed, and all that loads are divided by here divides them: sums are exact."""
    return 60 * np.random.default_rng(seed).geometric(0.1, (num_steps, num_experts)) ** 2


@settings(max_examples=60, deadline=None)
@given(sizes(), st.integers(0, 2**32), st.integers(0, 4))
def test_each_copy_is_the_one_that_helps_most(size: tuple[int, int, int], seed: int, num_steps: int) -> None:
    ep_size, per_rank, num_experts = size
    loads = random_loads(seed, num_steps, num_experts)

    def after(copies: Ints, expert: int) -> tuple[float, float, int, int]:
        more = copies + (np.arange(num_experts) == expert)
        return (loads / more).max(axis=1).sum(), -(loads / copies).sum(axis=0)[expert], int(copies[expert]), expert

    copies = np.ones(num_experts, np.int64)
    while copies.sum() < ep_size * per_rank:
        copies[min(after(copies, int(e)) for e in np.flatnonzero(copies < ep_size))[3]] += 1
    assert replicate(loads, ep_size * per_rank, ep_size).tolist() == copies.tolist()


# --- which rank holds which


def test_packed_by_steps_not_by_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four have 6. Experts 0 and 2 are hot in the first step, 1 and 3 in the second: each rank gets one of each,
    and a step waits for 6; for two that are hot together, which are as much in sum, it would wait 10."""
    monkeypatch.setattr(packing, "MAX_SWAPS", 0)
    loads = np.array([[5, 1, 5, 1], [1, 5, 1, 5]])
    slots = pack(loads, np.ones(4, np.int64), 2)
    assert slots.tolist() == [[0, 3], [1, 2]]
    assert waits(slots, loads) == 12
    assert waits(np.array([[0, 2], [1, 3]]), loads) == 20


def test_a_swap_improves_on_the_heaviest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heaviest first: 3 + 2 + 2 and 3 + 2 + 0. To swap a 3 for a 2 makes it 6 and 6."""
    loads = np.array([[3, 3, 2, 2, 2, 0]])
    assert waits(pack(loads, np.ones(6, np.int64), 2), loads) == 6
    monkeypatch.setattr(packing, "MAX_SWAPS", 0)
    assert waits(pack(loads, np.ones(6, np.int64), 2), loads) == 7


def test_among_equals_the_least_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a 10 nothing raises the sum: both 3 are not put on one rank for that."""
    monkeypatch.setattr(packing, "MAX_SWAPS", 0)
    assert pack(np.array([[10, 3, 3, 1, 1, 1]]), np.ones(6, np.int64), 3).tolist() == [[0, 5], [1, 3], [2, 4]]


def test_a_swap_is_judged_by_what_both_ranks_are_relieved_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have 18, 0 and 0, 16. A 6 for nothing makes it 12 + 16, a 6 for an 8 makes it 12 + 8."""
    monkeypatch.setattr(packing, "MAX_SWAPS", 1)
    loads = np.array([[6, 6, 6, 0, 0, 0], [0, 0, 0, 0, 8, 8]])
    held = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], np.bool_)
    assert waits(pack(loads, np.ones(6, np.int64), 2, held), loads) == 20


def test_no_other_swap_of_a_rank_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """However early those that cannot be the best are left out."""
    monkeypatch.setattr(packing, "NUM_AT_ONCE", 1)
    for seed in range(12):
        loads = random_loads(seed, 4, 12)
        slots = np.random.default_rng(seed).permutation(12).reshape(4, 3)
        ranks = packing._Ranks(np.ascontiguousarray(loads.T.astype(np.float64)), 4, 3)
        for rank, expert in np.ndindex(4, 3):
            ranks.put(np.intp(rank), np.intp(slots[rank, expert]))

        def swapped(expert: int, other: int, slots: Ints = slots, loads: Ints = loads) -> float:
            return waits(np.where(slots == expert, other, np.where(slots == other, expert, slots)), loads)

        for hot in range(4):
            best = ranks._best_swap(np.intp(hot), 0.0)
            least = min(swapped(mine, other) for mine in slots[hot] for other in range(12))  # with itself: nothing
            assert (swapped(-1, -1) if best is None else swapped(int(best[0]), int(best[2]))) == least


def test_nothing_moves_for_next_to_nothing() -> None:
    """10,002 to 9,998: a swap would make it even, for 0.02 %."""
    held = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], np.bool_)
    slots = pack(np.array([[5000, 5002, 5000, 4998]]), np.ones(4, np.int64), 2, held)
    assert slots.tolist() == [[0, 1], [2, 3]]


def test_no_room_but_where_it_is_already() -> None:
    """10 on one rank, 3 + 3 + 3 fill the other, a copy of expert 4 joins the 10; the only room for the second is
    beside it. The full rank gives a 3 away for it: 10 + 1 + 3."""
    loads = np.array([[10, 3, 3, 3, 2]])
    slots = pack(loads, np.array([1, 1, 1, 1, 2]), 2)
    assert all(4 in row for row in slots)
    assert waits(slots, loads) == 14


@pytest.mark.parametrize("copies", [[2, 1, 1, 1], [3, 1, 1, 1], [0, 2, 2, 2]])
def test_copies_that_cannot_be_packed(copies: list[int]) -> None:
    with pytest.raises(ValueError, match="together, on 2 ranks"):
        pack(np.ones((1, 4)), np.array(copies), 2)


@settings(max_examples=60, deadline=None)
@given(sizes(), st.integers(0, 2**32), st.integers(0, 4), st.booleans())
def test_packed_as_it_must_be(size: tuple[int, int, int], seed: int, num_steps: int, from_held: bool) -> None:
    """Whatever loads and copies have to do with one another: `Placement` says if an expert is missing or twice."""
    ep_size, per_rank, num_experts = size
    copies = replicate(random_loads(seed, num_steps, num_experts), ep_size * per_rank, ep_size)
    loads = random_loads(seed + 1, num_steps, num_experts)
    held = np.zeros((ep_size, num_experts), np.bool_)
    np.put_along_axis(held, (np.arange(ep_size * per_rank) % num_experts).reshape(ep_size, per_rank), True, axis=1)
    slots = pack(loads, copies, ep_size, held if from_held else None)
    assert slots.shape == (ep_size, per_rank)
    assert [len(of_expert) for of_expert in placed(slots).copies] == copies.tolist()


def test_what_is_held_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of expert 3 instead of two of expert 1: it goes from the rank with 6 + 9, not from that with 1 + 6."""
    monkeypatch.setattr(packing, "MAX_SWAPS", 0)
    held = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]], np.bool_)
    slots = pack(np.array([[1, 6, 9, 4, 1]]), np.array([1, 1, 1, 2, 1]), 3, held)
    assert slots.tolist() == [[0, 1], [2, 3], [3, 4]]


# --- the placement, and what it costs to change it


def test_balance_by_hand() -> None:
    """Expert 0 has two copies: ranks have 6 + 2 and 6 + 4, then 2 + 6 and 2 + 2: 10 / 9 and 8 / 6. A step without
    tokens is none."""
    placement = Placement(((0, 1), (2, 0)))
    assert placement.copies == (((0, 0), (1, 1)), ((0, 1),), ((1, 0),))
    loads = np.array([[12, 2, 4], [4, 6, 2], [0, 0, 0]])
    assert placement.balance(loads) == pytest.approx((10 / 9 + 8 / 6) / 2)
    assert placement.balance(loads[2:]) == 1.0
    with pytest.raises(ValueError, match="loads of 2 experts"):
        placement.balance(loads[:, :2])


@pytest.mark.parametrize("slots", [(), ((), ()), ((0, 1), (2,)), ((0, 0), (1, 2)), ((0, 1), (3, 0)), ((1, 2), (2, 1))])
def test_what_is_no_placement(slots: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="placement"):
        Placement(slots)


def test_contiguous() -> None:
    assert Placement.contiguous(4, 3, 1).slots == ((0, 1), (2, 3), (0, 1))


def test_settled_by_hand() -> None:
    """The two ranks have changed rows, and the slots their order: only the 4 and the 0 have really moved."""
    old, new = Placement(((0, 1, 2), (3, 4, 5))), Placement(((5, 3, 0), (2, 1, 4)))
    settled = settle(old, new)
    assert settled.slots == ((4, 1, 2), (3, 0, 5))
    assert moves(old, settled) == [(0, 0, 4), (1, 1, 0)]
    with pytest.raises(ValueError, match="rank 1 holds expert 4 in another slot"):
        moves(old, Placement(((0, 1, 2), (4, 3, 5))))
    with pytest.raises(ValueError, match="were"):
        moves(old, Placement(((0, 1), (2, 3), (4, 5))))


def test_settled_within_nodes() -> None:
    """Two nodes of two ranks. Rank by rank 0 and 4 could stay where they were, but then 0 and 1 were on two nodes."""
    old = Placement(((0, 4), (1, 5), (2, 6), (3, 7)))
    new = Placement(((6, 7), (2, 3), (0, 1), (4, 5)))
    settled = settle(old, new, 2)
    assert {frozenset(row) for row in settled.slots[:2]} == {frozenset((0, 1)), frozenset((4, 5))}
    assert len(moves(old, settled)) == 4


@settings(max_examples=60, deadline=None)
@given(sizes().filter(lambda size: size[2] > size[1]), st.integers(0, 2**32))
def test_settled_with_the_fewest_moves(size: tuple[int, int, int], seed: int) -> None:
    """As few as the best of all orders of the ranks; the rows are the same."""
    ep_size, per_rank, num_experts = size
    old, new = (
        placed(pack(loads, replicate(loads, ep_size * per_rank, ep_size), ep_size))
        for loads in (random_loads(seed, 3, num_experts), random_loads(seed + 1, 3, num_experts))
    )
    settled = settle(old, new)
    best = min(
        sum(len(set(row) - set(held)) for row, held in zip(order, old.slots, strict=True))
        for order in permutations(new.slots)
    )
    assert len(moves(old, settled)) == best
    assert sorted(map(sorted, settled.slots)) == sorted(map(sorted, new.slots))


# --- the plan


def test_a_layer_changes_when_it_pays() -> None:
    """Four experts on two ranks. The first layer is uneven (9 to 1), the second by less than is worth a move."""
    start = Placement(((0, 1), (2, 3)))
    loads = np.array([[[5, 4, 1, 0]], [[26, 25, 25, 24]]])
    advised = plan(loads, [start, start], 2, 0)
    assert advised.placements[1] is start
    assert advised.before == (1.8, 1.02)
    assert advised.after == (1.0, 1.02)
    assert len(moves(start, advised.placements[0])) == 2
    assert plan(np.zeros((1, 0, 4)), [start], 2, 0) == Plan((start,), (1.0,), (1.0,))
    assert plan(np.array([[[60, 21, 20, 20]]]), [start], 2, 0).placements[0] is start  # 81 beside 40, at best 80


@pytest.mark.parametrize(
    ("loads", "before", "after"),
    [
        ([35, 16, 9, 28, 34, 11, 15, 4], 1.441, 1.095),  # anew it were 1.066
        ([21, 39, 2, 20, 10, 15, 33, 23], 1.224, 1.003),  # by few moves it were 1.113
    ],
)
def test_packed_anew_when_it_is_much_better(loads: list[int], before: float, after: float) -> None:
    advised = plan(np.array([[loads]]), [Placement(((0, 1, 2), (3, 4, 5), (6, 7, 0)))], 3, 1)
    assert [*advised.before, *advised.after] == pytest.approx([before, after], abs=1e-3)


def test_few_moves_when_little_has_changed() -> None:
    """One of 64 experts becomes hot. From new it would be hardly more even, with most of the 80 slots changed."""
    loads = np.random.default_rng(1).integers(90, 110, (1, 8, 64)) * np.linspace(1, 5, 64)
    first = plan(loads, [Placement.contiguous(64, 8, 16)], 8, 16).placements[0]
    loads[:, :, 20] *= 6
    advised = plan(loads, [first], 8, 16)
    assert advised.before[0] > 1.2
    assert advised.after[0] < 1.05
    assert len(moves(first, advised.placements[0])) <= 25
    fresh = placed(pack(loads[0], replicate(loads[0], 80, 8), 8))
    assert len(moves(first, settle(first, fresh))) > 50


def test_of_another_size_it_is_packed_anew() -> None:
    """However even it was: a group of other size cannot keep it."""
    advised = plan(np.ones((1, 1, 6)), [Placement.contiguous(6, 2, 0)], 3, 0)
    assert len(advised.placements[0].slots) == 3
    assert advised.before == advised.after == (1.0,)


def test_copies_of_an_expert_on_one_node() -> None:
    """Two nodes of four ranks. When one expert becomes hot its node changes a little. Three nodes do not divide the
    ranks, so it is global."""
    rng = np.random.default_rng(0)
    loads = rng.integers(90, 110, (1, 8, 64)) * rng.permutation(np.linspace(1, 3, 64))
    first = plan(loads, [Placement.contiguous(64, 8, 16)], 8, 16, 2)
    loads[:, :, 20] *= 3
    second = plan(loads, first.placements, 8, 16, 2)
    for advised in (first, second):
        assert all(len({rank // 4 for rank, _ in of_expert}) == 1 for of_expert in advised.placements[0].copies)
        assert advised.after[0] < 1.03 < 1.1 < advised.before[0]
    assert len(moves(first.placements[0], second.placements[0])) <= 30
    assert plan(loads, first.placements, 8, 16, 3) == plan(loads, first.placements, 8, 16)


@pytest.mark.parametrize(
    "loads", [np.full((1, 2, 4), -1), np.full((1, 2, 4), np.nan), np.ones((1, 4)), np.ones((2, 2, 4))]
)
def test_what_are_no_loads(loads: Ints) -> None:
    with pytest.raises(ValueError, match="1 layers need loads"):
        plan(loads, [Placement.contiguous(4, 2, 0)], 2, 0)


@settings(max_examples=30, deadline=None)
@given(sizes().filter(lambda size: size[2] > 1), st.integers(0, 2**32), st.integers(1, 3))
def test_never_worse_than_it_was(size: tuple[int, int, int], seed: int, num_nodes: int) -> None:
    ep_size, per_rank, num_experts = size
    old = placed((np.arange(ep_size * per_rank) % num_experts).reshape(ep_size, per_rank))
    loads = random_loads(seed, 3, num_experts)[None]
    advised = plan(loads, [old], ep_size, ep_size * per_rank - num_experts, num_nodes)
    new = advised.placements[0]
    assert advised.after[0] == new.balance(loads[0]) <= advised.before[0] == old.balance(loads[0])
    assert len(moves(old, new)) <= ep_size * per_rank


# --- how even it makes skewed loads


@pytest.mark.parametrize("ep_size", [64, 128])
def test_zipf_on_many_ranks(ep_size: int) -> None:
    """The real layer: 384 experts, six of them for each of 128 tokens per rank. Measured on steps not planned for."""
    rng = np.random.default_rng(0)
    steps = rng.multinomial(6 * 128 * ep_size, zipf(384, rng), (1, 48))
    start = Placement.contiguous(384, ep_size, 32)
    advised = plan(steps[:, :32], [start], ep_size, 32)
    assert start.balance(steps[0, 32:]) > 8
    assert advised.placements[0].balance(steps[0, 32:]) < 1.15


def test_hot_experts_that_change_between_steps() -> None:
    """One of eight experts has a sixth of each step: of the mean each is a 48th. The published greedy, which sees only
    that, leaves each with fewer copies; measured on steps not planned for."""
    rng = np.random.default_rng(0)
    chances = np.tile(zipf(128, rng) ** 0.5, (64, 1))
    chances[range(64), rng.choice(8, 64)] += chances[0].sum() / 5
    steps = np.stack([rng.multinomial(6 * 128 * 16, chance / chance.sum()) for chance in chances])
    ours = plan(steps[None, :48], [Placement.contiguous(128, 16, 32)], 16, 32).placements[0]
    theirs = by_mean(steps[:48], 160, 16)
    assert waits(np.array(ours.slots), steps[48:]) < 0.7 * waits(theirs, steps[48:])
