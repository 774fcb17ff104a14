import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.places import check_places, first_places, near_places, num_redundant


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "at_least", "extra"),
    [(8, 2, 0, 0), (8, 3, 0, 1), (8, 4, 1, 4), (256, 32, 32, 32), (384, 64, 32, 64), (5, 2, 5, 5)],
)
def test_ranks_have_equally_many_with_as_few_copies_as_possible(
    num_experts: int, num_ranks: int, at_least: int, extra: int
) -> None:
    assert num_redundant(num_experts, num_ranks, at_least) == extra
    places = first_places(num_experts, num_ranks, at_least)
    assert places.shape == (num_ranks, (num_experts + extra) // num_ranks)
    check_places(places, num_experts)


def test_a_rank_never_needs_two_copies() -> None:
    with pytest.raises(ValueError, match="a rank would hold one twice"):
        num_redundant(8, 2, 9)
    assert num_redundant(8, 2, 8) == 8


def test_places_that_no_group_could_use() -> None:
    with pytest.raises(ValueError, match="these are placed"):
        check_places(np.array([[0, 1], [1, 0]]), 3)
    with pytest.raises(ValueError, match="rank 1 would hold an expert twice"):
        check_places(np.array([[0, 1], [2, 2]]), 3)


@example((3, [[0], [0], [0, 1, 2]]), 0)
@given(
    st.integers(1, 12).flatmap(
        lambda num: st.tuples(
            st.just(num), st.lists(st.lists(st.integers(0, num - 1), unique=True), min_size=1, max_size=5)
        )
    ),
    st.integers(0, 12),
)
def test_whatever_ranks_hold_there_are_places_for_all_and_who_has_room_loads_no_more_than_that(
    held: tuple[int, list[list[int]]], at_least: int
) -> None:
    num_experts, rows = held
    places = near_places(rows, num_experts, at_least)
    check_places(places, num_experts)
    assert near_places(places.tolist(), num_experts, at_least).tolist() == places.tolist()
    stayed = [set(row).intersection(mine) for row, mine in zip(rows, places.tolist(), strict=True)]
    homeless = set(range(num_experts)).difference(*stayed)  # nobody has them, or who does has no room for them
    for row, mine in zip(rows, places.tolist(), strict=True):
        kept = [expert for expert in row if expert in mine]
        assert mine[: len(kept)] == kept
        loaded = set(mine).difference(row)
        dropped = set(row).difference(mine)
        assert not dropped or loaded <= homeless  # room is made for those, and for nothing else


def test_a_group_that_shrinks_or_grows_loads_what_is_missing() -> None:
    rows = first_places(8, 4, 0).tolist()
    assert near_places(rows[:3], 8, 0).tolist() == [[0, 1, 6], [2, 3, 7], [4, 5, 0]]
    assert near_places(rows[:1], 8, 3).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]  # copies on one rank are of no use
    assert near_places([list(range(8)), [4, 5, 6, 7]], 8, 0).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
