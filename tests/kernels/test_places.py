import numpy as np
import pytest

from kernels.places import check_places, first_places, num_redundant


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
