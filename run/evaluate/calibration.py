"""Whether confidence is what it says: expected calibration error, and the temperatures that make it small (STS).

A block's survival at a place is the product of the confidences up to there: how likely the target agrees with all of
its drafts so far. Sequential temperature scaling (spec §8.3) divides the raw confidence of each place by a temperature
of its own, found from left to right, earlier ones fixed, such that the error of the survival is least.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from run.settings import SettingsError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

NUM_BINS = 10
GRID: Floats = np.geomspace(0.1, 10.0, 201, dtype=np.float64)
"""Temperatures that are tried; 1 is one of them."""


def temperatures_of(folder: Path, num_places: int) -> Floats | None:
    """What the checkpoint in `folder` is calibrated with, [places]: `confidence_temperatures` of its shoal.json; None
    where it says nothing. Raises SettingsError when they are not so many positive numbers."""
    path = folder / "shoal.json"
    told = json.loads(path.read_text()).get("confidence_temperatures") if path.exists() else None
    if told is None:
        return None
    is_list = isinstance(told, list) and len(told) == num_places
    if not is_list or not all(isinstance(one, int | float) and one > 0 for one in told):
        raise SettingsError(f"{path}: confidence_temperatures must be {num_places} numbers above 0")
    return np.array(told, dtype=np.float64)


def write_temperatures(folder: Path, temperatures: Floats | None) -> None:
    """Say in the shoal.json of `folder` what its drafts are calibrated with, or with None that they are not."""
    path = folder / "shoal.json"
    card = json.loads(path.read_text()) if path.exists() else {}
    card.pop("confidence_temperatures", None)
    if temperatures is not None:
        card["confidence_temperatures"] = [round(float(one), 4) for one in temperatures]
    path.write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")


def survival(raw: Floats, at: Floats) -> Floats:
    """Products of the confidences from the first place on, at temperatures `at` [places]: `raw` [n, places], before the
    sigmoid -> [n, places]."""
    return np.cumprod(_sigmoid(raw / at), 1, dtype=np.float64)


def expected_error(said: Floats, came: Bools) -> float:
    """Expected calibration error of probabilities `said` [n] for what `came` [n], in NUM_BINS bins of equal width: the
    mean distance, by how many fall into each, of what was said on average from how often it came. 0 for none."""
    bins = np.minimum((said * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = [abs(float((said[bins == one] - came[bins == one]).sum())) for one in range(NUM_BINS)]
    return sum(gaps) / len(said) if len(said) else 0.0


def errors(raw: Floats, num_right: Counts, num_counted: Counts, at: Floats) -> list[float]:
    """The error of the survival at each place, at temperatures `at` [places].

    raw: [n, places]; num_right: how many drafts of each block were right, from the first on; num_counted: how many
    count. What an answer's end cuts off was neither right nor wrong.
    """
    said = survival(raw, at)
    found = []
    for place in range(raw.shape[1]):
        counted = num_counted > place
        found.append(expected_error(said[counted, place], num_right[counted] > place))
    return found


def fit(raw: Floats, num_right: Counts, num_counted: Counts) -> Floats:
    """The temperatures [places], place by place, that make `errors` least; of equal ones that nearest to 1."""
    temperatures = np.ones(raw.shape[1])
    grid = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    before = np.ones(len(raw))
    for place in range(raw.shape[1]):
        counted = num_counted > place
        came = num_right[counted] > place
        tried = [expected_error(before[counted] * _sigmoid(raw[counted, place] / one), came) for one in grid]
        temperatures[place] = grid[int(np.argmin(tried))]
        before = before * _sigmoid(raw[:, place] / temperatures[place])
    return temperatures


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0)))
