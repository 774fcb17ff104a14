"""What is drafted and verified: budgets against all others, learning, trying again; times that never fall."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.schedule import History, Mode, Scheduler, _survival, budget
from kernels.steptimes import Floats, StepTimes

SIZE = 5
SURE, UNSURE = [4.0] * SIZE, [-4.0] * SIZE


def times_of(row_s: float, base_s: float = 0.01, sizes: Iterable[int] = range(1, 100)) -> StepTimes:
    times = StepTimes()
    for size in sizes:
        for _ in range(3):
            times.add(size, base_s + row_s * size)
    return times


def scheduler(row_s: float, draft_s: float, mode: Mode = "scheduled") -> Scheduler:
    return Scheduler(mode, np.ones(SIZE), times_of(row_s), times_of(0.0, draft_s))


def step(one: Scheduler, histories: list[History], raw: dict[int, list[float]], right: dict[int, int]) -> list[int]:
    """Of each request, the drafts that a step verifies; -1 where none were made."""
    verified = [-1] * len(histories)
    chosen = one.choose(histories, [SIZE] * len(histories))
    if chosen:
        blocks = np.array([raw[number] for number in chosen])
        lengths, sure = one.admit(blocks, [SIZE] * len(chosen), [histories[i] for i in chosen], len(histories))
        for number, length, confidence in zip(chosen, lengths, sure, strict=True):
            verified[number] = length
            one.learn(histories[number], confidence[:length], min(right[number], length))
    return verified


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2), min_size=1, max_size=3),
    st.lists(st.floats(0.001, 1.0), min_size=9, max_size=9),
    st.floats(0.0, 0.5),
)
def test_no_other_budget_is_better(blocks: list[list[float]], each_s: list[float], draft_s: float) -> None:
    """Against every choice of lengths, with times that rise in steps of any height."""
    times = StepTimes()
    for size, took_s in enumerate(np.cumsum(each_s), 1):
        for _ in range(3):
            times.add(size, float(took_s))
    survival = np.cumprod(np.array(blocks), 1)
    num, speed = budget(-np.sort(-survival.ravel()), len(blocks), draft_s, times)
    best = 0.0
    for lengths in itertools.product(range(3), repeat=len(blocks)):
        tokens = len(blocks) + sum(float(row[:length].sum()) for row, length in zip(survival, lengths, strict=True))
        took_s = draft_s + float(times.at(np.array([len(blocks) + sum(lengths)]))[0])
        best = max(best, tokens / took_s)
    assert speed == pytest.approx(best)
    assert 0 <= num <= survival.size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-4, 10.0)), min_size=3, max_size=60))
def test_more_rows_never_take_less(passes: list[tuple[int, float]]) -> None:
    times = StepTimes()
    for size, took_s in [*passes, *[passes[0]] * 3]:
        times.add(size, took_s)
    at = times.at(np.arange(1, 700))
    assert np.all(np.diff(at) >= -1e-12)
    low, high = (pick(took for _, took in passes) for pick in (min, max))
    assert low * 0.999 <= at[0] <= high * 1.001


def test_a_pass_that_was_held_up_does_no_harm_and_slower_ones_count_soon() -> None:
    times = times_of(0.001, sizes=(1, 4, 16, 64))
    before = times.at(np.array([16]))
    times.add(16, 30.0)
    assert times.at(np.array([16])) == before
    assert times.knows(16) and times.knows(20) and not times.knows(30)
    for took_s in [0.1] * 100 + [0.2] * 10:
        times.add(64, took_s)
    assert times.at(np.array([64, 128])).tolist() == pytest.approx([0.2, 0.2 + 64 * (0.2 - 0.011) / 63])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_verified_are_the_surest_prefixes(data: st.DataObject) -> None:
    row = st.lists(st.floats(-60.0, 60.0), min_size=SIZE, max_size=SIZE)
    raw = np.array(data.draw(st.lists(row, min_size=1, max_size=4)))
    room = data.draw(st.lists(st.integers(1, SIZE), min_size=len(raw), max_size=len(raw)))
    row_s = data.draw(st.sampled_from([0.0, 0.004]))
    one, histories = scheduler(row_s, 0.003), [History() for _ in raw]
    lengths, confidence = one.admit(raw, room, histories, len(raw))
    survival: Floats = np.cumprod(np.minimum(confidence, 0.995), 1, dtype=np.float64)
    taken = [survival[i, j] for i, length in enumerate(lengths) for j in range(length)]
    left = [survival[i, j] for i, length in enumerate(lengths) for j in range(length, room[i])]
    assert all(length <= most for length, most in zip(lengths, room, strict=True))
    assert min(taken, default=1.0) >= max(left, default=0.0)
    assert lengths == room or row_s


def test_rows_that_cost_nothing_are_all_verified_and_dear_ones_are_not() -> None:
    for row_s, many in ((0.0, True), (0.02, False)):
        one, histories = scheduler(row_s, 0.001), [History() for _ in range(8)]
        found = step(one, histories, dict.fromkeys(range(8), [0.5] * SIZE), dict.fromkeys(range(8), 1))
        assert (sum(found) == 8 * SIZE) == many


def test_where_fewer_are_hardly_better_all_are_verified() -> None:
    one, block = scheduler(0.0002, 0.001), np.array([[2.0, 2.0, 2.0, 2.0, -4.0]])
    survival = _survival(1 / (1 + np.exp(-block)), 1.0)[0]
    assert budget(survival, 1, 0.001, one.verify_times)[0] == 4
    assert one.admit(block, [SIZE], [History()], 1)[0] == [SIZE]
    assert one.admit(block, [SIZE - 1], [History()], 1)[0] == [SIZE - 1]


def test_whom_is_drafted_for_beside_one_that_it_pays_for() -> None:
    """Who it hardly costs anything for, who is new, and who was left out for long; seldom nobody."""
    for block_s, chosen in ((0.0005, [0, 1]), (0.003, [0])):
        one = Scheduler("scheduled", np.ones(SIZE), times_of(0.001), times_of(block_s, 0.002))
        sure, unsure = History(), History()
        for _ in range(32):
            one._blocks.add(np.zeros(SIZE))
            sure.add(np.full(SIZE, 0.99))
            unsure.add(np.zeros(SIZE))
        assert one.choose([sure, unsure], [SIZE] * 2) == chosen
        assert one.choose([sure, History()], [SIZE] * 2) == [0, 1]
        unsure.idle = 32
        assert one.choose([sure, unsure], [SIZE] * 2) == [0, 1]
        assert (sure.idle, unsure.idle) == (0, 0)
    one, histories = scheduler(0.001, 0.002), [History()]
    found = [step(one, histories, {0: SURE}, {0: SIZE}) for _ in range(1000)]
    assert 1 <= found.count([-1]) <= 20


def test_drafts_are_worth_what_their_rows_leave_and_new_ones_what_others_are() -> None:
    for row_s, chosen in ((0.001, [0]), (0.02, [])):
        one, history = scheduler(row_s, 0.001), History()
        for _ in range(8):
            history.add(np.full(SIZE, 0.5))
            one._blocks.add(np.zeros(SIZE))
        assert one.choose([history], [SIZE]) == chosen
        assert one.choose([History()], [SIZE]) == []
        for _ in range(32):
            one.learn(history, [0.9] * SIZE, 0)
        assert one._corrections([History()])[0] < 0.3


def test_a_decision_holds_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also against requests that were never drafted for; those that come alone, or with a first block, ask for one, but
    where it has long been for all: there only many at once do."""
    made: list[int] = []
    decide = Scheduler._decide

    def counted(one: Scheduler, histories: list[History], able: list[int]) -> list[int]:
        made.append(len(able))
        return decide(one, histories, able)

    monkeypatch.setattr(Scheduler, "_decide", counted)
    for row_s, least, most in ((0.02, 2, 6), (0.0, 7, 9)):
        one, histories = scheduler(row_s, 0.001), [History() for _ in range(4)]
        for _ in range(32):
            one._blocks.add(np.full(SIZE, 0.5))
        for _ in range(64):
            step(one, histories, dict.fromkeys(range(4), [0.0] * SIZE), dict.fromkeys(range(4), 2))
        assert least <= len(made) <= most
        made.clear()
        for num_new, num_asked in ((1, 0), (2, 1)):
            one._num_held = 0
            histories[:num_new] = [History() for _ in range(num_new)]
            for _ in range(2):
                step(one, histories, dict.fromkeys(range(4), [0.0] * SIZE), dict.fromkeys(range(4), 2))
            assert len(made) == (0 if row_s else num_asked)
        made.clear()
        step(one, [moved := History.load(histories[0].dump(), SIZE)], {0: [0.0] * SIZE}, {0: 2})
        assert made == [1] and moved.is_chosen is not None
        made.clear()
        for new in (History(), History()):
            for _ in range(2):
                step(one, [new], {0: [0.0] * SIZE}, {0: 2})
        assert made == [1, 1], "one each: the first block's, or before it where nobody is drafted for"
        made.clear()


def test_by_a_long_held_decision_drafts_are_priced_anew_every_few_steps() -> None:
    """One request, whose text is foreseen well and badly by turns."""
    one, histories, found = scheduler(0.001, 0.004), [History()], list[list[int]]()
    for number in range(480):
        is_good = number // 8 % 2 == 0
        found.append(step(one, histories, {0: SURE if is_good else UNSURE}, {0: SIZE if is_good else 0}))
    in_vain = [verified for number, (verified,) in enumerate(found) if number // 8 % 2]
    assert in_vain.count(SIZE) < 0.6 * len(in_vain)
    assert sum(verified == SIZE for (verified,) in found) > 200


def test_steps_without_drafts_do_not_make_a_decision_long() -> None:
    one, history = scheduler(0.001, 0.004), History()
    for _ in range(8):
        history.add(np.zeros(SIZE))
        one._blocks.add(np.zeros(SIZE))
    assert one.choose([history], [SIZE]) == []
    one._num_held = 15
    for _ in range(8):
        history.add(np.full(SIZE, 0.9))
    assert one.choose([history], [SIZE]) == [0]
    assert one._num_steady == 0


def test_each_place_has_its_temperature() -> None:
    one = Scheduler("fixed", np.array([1.0, 2.0]))
    _, confidence = one.admit(np.array([[1.0, 2.0]]), [2], [History()], 1)
    assert confidence.tolist() == [[pytest.approx(0.7310586), pytest.approx(0.7310586)]]


def test_what_is_no_number_is_half_sure() -> None:
    history = History()
    _, confidence = scheduler(0.0, 0.001).admit(np.full((1, SIZE), np.nan), [SIZE], [history], 1)
    assert confidence.tolist() == [[0.5] * SIZE]
    assert np.isfinite(history.dump()).all()


def test_what_is_known_of_drafts_ends_with_the_first_wrong_one_and_fades() -> None:
    one, history = scheduler(0.0, 0.001), History()
    one.learn(history, [0.5] * SIZE, 1)
    assert (history.record.right, history.record.promised) == (1.0, 1.0)
    one.learn(history, [0.5] * SIZE, SIZE)
    assert history.record.right == pytest.approx(0.95 + 5.0)
    assert history.record.promised == pytest.approx(0.95 + 2.5)
    luck = history.record.correction()
    assert luck == pytest.approx(9.95 / 7.45)
    assert _survival(np.full(2, 0.9), luck).tolist() == pytest.approx([0.995, 0.995**2]), "nothing is surer"


def test_a_request_that_drafts_do_not_help_is_left_out_beside_one_that_they_do() -> None:
    """By its confidences, or where they say too much by its own acceptance."""
    for doubtful in (UNSURE, SURE):
        one, histories = scheduler(0.001, 0.002), [History(), History()]
        found = [step(one, histories, {0: SURE, 1: doubtful}, {0: SIZE, 1: 0}) for _ in range(60)]
        assert sum(verified > 0 for verified, _ in found) > 50
        assert sum(verified > 0 for _, verified in found[20:]) < 10


def test_it_notices_rarely_but_surely_that_drafting_pays_again() -> None:
    one, histories = scheduler(0.001, 0.006), [History()]
    found = [step(one, histories, {0: UNSURE}, {0: 0}) for _ in range(400)]
    num_tries = sum(verified >= 0 for (verified,) in found[20:])
    assert 1 <= num_tries <= 10
    assert one._gain == pytest.approx(1.0, rel=0.01)
    found = [step(one, histories, {0: SURE}, {0: SIZE}) for _ in range(400)]
    assert sum(verified > 0 for (verified,) in found) > 100
    assert one._gain == pytest.approx((1 + 5 * 0.95) * 0.011 / 0.022, rel=0.1)
    for _ in range(200):
        step(one, histories, {0: UNSURE}, {0: 0})
    assert one._gain == pytest.approx(1.0, rel=0.01)


def test_times_that_nobody_knows_are_found_out() -> None:
    one, histories = Scheduler("scheduled", np.ones(SIZE)), [History() for _ in range(3)]
    for _ in range(20):
        found = step(one, histories, dict.fromkeys(range(3), UNSURE), dict.fromkeys(range(3), 0))
        num_blocks = sum(verified >= 0 for verified in found)
        one.took(num_blocks, 0.01, [1 + max(verified, 0) for verified in found], 0.01)
    assert one.verify_times.knows(3) and one.verify_times.knows(18) and one.draft_times.knows(3)


@pytest.mark.parametrize("allowed", [[5, 5, 5, 2], [2] * 4, [0] * 4, [5, 5, 1, 0]])
def test_times_are_found_out_of_drafts_that_constraints_cut(allowed: list[int]) -> None:
    """No step is ever of all drafts, nor an even one; drafts that are worth nothing are not made for ever."""
    one, histories = Scheduler("scheduled", np.ones(SIZE)), [History() for _ in allowed]
    chosen = list[list[int]]()
    for _ in range(60):
        lengths, chosen = [1] * len(allowed), [*chosen, one.choose(histories, [SIZE] * len(allowed))]
        if chosen[-1]:
            assert len(chosen[-1]) == len(allowed)
            verified, sure = one.admit(np.array([UNSURE] * len(allowed)), allowed, histories, len(allowed))
            lengths = [1 + num for num in verified]
            for history, num, confidence in zip(histories, verified, sure, strict=True):
                one.learn(history, confidence[:num], 0)
        one.took(len(chosen[-1]), 0.01, lengths, 0.01 + 0.01 * sum(lengths))
    assert 3 <= sum(map(bool, chosen)) <= 6


def test_sure_drafts_that_a_constraint_forbids_are_worth_nothing() -> None:
    for allowed, most in ((0, 3), (SIZE, 60)):
        one, histories, chosen = scheduler(0.001, 0.002), [History() for _ in range(2)], list[list[int]]()
        for _ in range(60):
            chosen.append(one.choose(histories, [SIZE] * 2))
            if chosen[-1]:
                one.admit(np.array([SURE] * 2), [allowed] * 2, histories, 2)
        assert most - 2 <= sum(map(bool, chosen)) <= most


def test_fixed_drafts_for_all_that_have_room_and_off_for_none() -> None:
    histories = [History() for _ in range(3)]
    fixed, off = (scheduler(1.0, 1.0, mode) for mode in ("fixed", "off"))
    assert fixed.choose(histories, [5, 0, 1]) == [0, 2]
    assert fixed.admit(np.array([UNSURE, UNSURE]), [5, 1], histories[::2], 3)[0] == [5, 1]
    assert off.choose(histories, [5, 5, 5]) == []


def test_a_history_is_what_was_dumped_of_it() -> None:
    one, history = scheduler(0.0, 0.001), History()
    for num_right in range(12):
        step(one, [history], {0: [float(num_right)] * SIZE}, {0: num_right % SIZE})
    numbers = history.dump()
    again = History.load(numbers, SIZE)
    assert again.dump() == numbers
    assert one.choose([again], [SIZE]) == [0]
    for wrong in (numbers[:2], numbers[:-1], [*numbers[:3], float("nan"), *numbers[4:]], [-1.0, *numbers[1:]]):
        with pytest.raises(ValueError, match="history"):
            History.load(wrong, SIZE)


def test_steps_of_uneven_lengths_are_dearer_by_what_they_took_of_late() -> None:
    one = scheduler(0.001, 0.001)
    survival = np.array([0.9, 0.9, 0.9, 0.5, 0.2, 0.2])
    assert budget(survival, 2, 0.001, one.verify_times)[0] == 4
    assert budget(survival, 2, 0.001, one.verify_times, 1.2)[0] == 6, "all are even again"
    for _ in range(60):
        one.took(2, 0.001, [3, 1], 1.2 * (0.01 + 4 * 0.001))
    assert one._uneven == pytest.approx(1.2, abs=0.01)
    assert one.verify_times.at(np.array([4]))[0] == pytest.approx(0.014), "even ones are not"
    one.took(2, 0.001, [3, 1], 60.0)  # held up
    assert one._uneven < 1.25
