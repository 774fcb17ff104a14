"""How much of a flood is looked at."""

from __future__ import annotations

from bus.public import ANSWERED_PER_S, TAKEN_PER_S, Admission, Sluice


def test_a_flood_is_taken_then_refused_then_dropped_and_the_next_second_is_new() -> None:
    sluice = Sluice()
    verdicts = [sluice.admit(5.0 + i / 1e6) for i in range(ANSWERED_PER_S + 10)]
    assert verdicts.count(Admission.TAKE) == TAKEN_PER_S
    assert verdicts.count(Admission.REFUSE) == ANSWERED_PER_S - TAKEN_PER_S
    assert verdicts[-10:] == [Admission.DROP] * 10 and sluice.num_dropped == 10
    assert sluice.admit(6.0) is Admission.TAKE


def test_what_comes_at_a_bearable_rate_is_all_taken() -> None:
    sluice = Sluice()
    assert {sluice.admit(i / TAKEN_PER_S) for i in range(5 * TAKEN_PER_S)} == {Admission.TAKE}
