"""Taps that wait: whenever windows are read, they are those of rows that were observed at once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels.taps import Taps

WINDOW, ROLLBACK, SLOTS, RING = 8, 3, 2, 16


def observe(taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.stack((taps + positions[:, None], -taps), 0)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_read_late_is_what_was_computed(seed: int) -> None:
    rng, number = random.Random(seed), 0.0
    windows = torch.zeros(2, SLOTS, RING, 2)
    taps = Taps(windows, 2, WINDOW, ROLLBACK)
    known: list[list[float]] = [[] for _ in range(SLOTS)]
    first, longest = [0] * SLOTS, [0] * SLOTS
    for _ in range(400):
        slot = rng.randrange(SLOTS)
        rows = known[slot]
        match rng.choice(["compute", "compute", "truncate", "settle", "begin"]):
            case "compute":
                new = [number + place for place in range(rng.choice([1, 1, 4, 30]))]
                number, begin = number + len(new), len(rows)
                rows += new
                longest[slot] = max(longest[slot], len(rows))
                source = np.arange(len(new))[-taps.ring_rows :]
                values = torch.tensor([*new, -1.0])[:, None, None]
                place = slot * taps.ring_rows + (begin + source) % taps.ring_rows
                taps.keep([values, values], (source, place), observe)
            case "truncate":
                least = max(longest[slot] - ROLLBACK, first[slot])
                del rows[rng.randint(min(least, len(rows)), len(rows)) :]
                taps.truncate(slot, len(rows))
            case "settle":
                taps.settle(range(SLOTS), first, [len(each) for each in known])
                for each in range(SLOTS):
                    for position in range(max(len(known[each]) - WINDOW, first[each]), len(known[each])):
                        value = known[each][position]
                        got = windows[:, each, position % RING].tolist()
                        assert got == [[value + position] * 2, [-value] * 2], (each, position)
            case _ if rng.random() < 0.2:
                first[slot] = longest[slot] = rng.randrange(20)
                rows[:] = [-1.0] * first[slot]
                windows[:, slot] = 0
                taps.begin(slot, first[slot])
    assert not windows.isnan().any()


def test_rows_of_whoever_had_the_slot_before_are_not_observed() -> None:
    windows = torch.zeros(2, 1, RING, 2)
    taps = Taps(windows, 2, WINDOW, ROLLBACK)
    taps.settle([0], [0], [5])  # nothing was ever kept
    taps.keep([torch.full((5, 1, 1), torch.nan)] * 2, (np.arange(5), np.arange(5)), observe)
    taps.begin(0, 0)
    taps.settle([0], [9], [4])
    taps.begin(0, 4)
    taps.settle([0], [0], [4])
    assert not windows.any()
    taps.keep([torch.ones(1, 1, 1)] * 2, (np.arange(1), np.arange(4, 5)), observe)
    taps.settle([0], [0], [5])
    assert windows[:, 0, 4].tolist() == [[5.0, 5.0], [-1.0, -1.0]]
    assert not windows[:, 0, :4].any() and not windows[:, 0, 5:].any()


def test_a_place_that_waits_twice_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two rows for one place would count is not said, on a GPU."""
    written: list[list[int]] = []

    class Noted(torch.Tensor):
        def __setitem__(self, places: torch.Tensor, rows: torch.Tensor) -> None:  # type: ignore[override]
            written.append(places.tolist())
            super().__setitem__(places, rows)

    windows = torch.zeros(2, 1, RING, 1)
    taps = Taps(windows, 1, WINDOW, ROLLBACK)
    monkeypatch.setattr(taps, "_rows", taps._rows.as_subclass(Noted))
    for value in (1.0, 2.0, 3.0):
        taps.keep([torch.full((2, 4, 1), value)], (np.arange(2), np.array([0, int(value)])), observe)
    taps.settle([0], [0], [4])
    assert written == [[0, 1, 2, 3]]
    assert windows[1, 0, :4, 0].tolist() == [-3.0, -1.0, -2.0, -3.0]
