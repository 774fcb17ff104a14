"""What the router of a small model was seen to do, and the model of hundreds of experts that is made up from it.

The small model has 8 experts and picks 2, the published one 384 and 6: how one stands for the other is an assumption.
Each recorded expert stands for as many of the published ones. These share its rows as unevenly (by Gini coefficient) as
the recorded experts share all rows, and their order is as alike from task to task (by correlation) as theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Picks = NDArray[np.int64]
"""The experts that each row of one request picked, `[rows, picks]`."""

RECORDED = Path(__file__).with_name("routing.json")


class Recorded(msgspec.Struct, frozen=True):
    """Of the rows that decode would compute for right answers to held-out prompts, per layer and task.

    `shares [layers][tasks][experts]` of all picks, adding up to 1. `alike [layers][tasks]`: see `alike`. `num_rows` and
    `num_requests` by task.
    """

    model: str
    num_picks: int
    tasks: list[str]
    num_requests: list[int]
    num_rows: list[int]
    shares: list[list[list[float]]]
    alike: list[list[float]]

    @classmethod
    def read(cls, path: Path = RECORDED) -> Recorded:
        """Raises OSError, and msgspec.ValidationError where it is none."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def shares(requests: Sequence[Picks], num_experts: int) -> Floats:
    """Which part of all picks each expert got, `[experts]`."""
    counts = np.bincount(np.concatenate(requests).ravel(), minlength=num_experts)
    parts: Floats = counts / counts.sum()
    return parts


def alike(requests: Sequence[Picks], num_experts: int) -> float:
    """How much more alike two rows of one request pick than two of different requests: 0 when it makes no difference
    whose they are, 1 when each request has its own experts.

    (J - K) / (1 - K), J and K the chances that a pick of each of two rows is the same expert. The chance of an
    expert then varies from request to request with variance p (1 - p) times this. It is never below 0 here, though
    what is counted in few rows may be. Raises ValueError when no request has two rows, or there is only one.
    """
    counts = np.stack([np.bincount(picks.ravel(), minlength=num_experts) for picks in requests]).astype(np.float64)
    rows, per_row = np.array([len(picks) for picks in requests]), requests[0].shape[1]
    own = (counts**2).sum()  # pairs of picks that are the same, with those of a row with itself
    inside, across = (rows * (rows - 1)).sum() * per_row**2, (rows.sum() ** 2 - (rows**2).sum()) * per_row**2
    if not inside or not across:
        raise ValueError("two requests of two rows or more are needed")
    within = (own - rows.sum() * per_row) / inside
    between = ((counts.sum(axis=0) ** 2).sum() - own) / across
    return max(0.0, float((within - between) / (1.0 - between))) if between < 1.0 else 0.0


def gini(parts: Floats) -> float:
    """How unequal `parts [n]` are: 0 when all are the same, (n - 1) / n when one has everything."""
    ordered, n = np.sort(parts), len(parts)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * ordered.sum()))


def zipf(num: int, exponent: float) -> Floats:
    """Shares `[num]`, the largest first, that fall with rank to the power of `exponent`; they add up to 1."""
    parts = np.arange(1, num + 1, dtype=np.float64) ** -exponent
    parts /= parts.sum()
    return parts


def exponent_of(coefficient: float, num: int) -> float:
    """The exponent, 5 at most, with which `num` shares by Zipf have that Gini coefficient."""
    low, high = 0.0, 5.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if gini(zipf(num, middle)) < coefficient else (low, middle)
    return low


def chances(parts: Floats, num_picks: int) -> Floats:
    """The chance that a row picks an expert, `[..., experts]`, all together `num_picks`, from experts' `parts`.

    Picked one after the other, each with the chance of its part of those that are left: 1 - exp(-t part), with the t
    that gives so many picks.
    """
    low, high = np.zeros(parts.shape[:-1]), np.full(parts.shape[:-1], 1e9)
    for _ in range(100):
        middle = (low + high) / 2
        is_less = -np.expm1(-middle[..., None] * parts).sum(axis=-1) < num_picks
        low, high = np.where(is_less, middle, low), np.where(is_less, high, middle)
    return -np.expm1(-low[..., None] * parts)


def scaled_up(recorded: Floats, num_experts: int, rng: np.random.Generator) -> Floats:
    """Shares `[tasks, num_experts]` of a model with more experts, made up from one layer's `recorded [tasks, experts]`.

    How is said above. Each recorded expert stands for as many as the next, or one more; which ones is drawn. Raises
    ValueError when there are fewer than recorded.
    """
    num_tasks, num_recorded = recorded.shape
    if num_experts < num_recorded:
        raise ValueError(f"{num_experts} experts cannot stand for {num_recorded}")
    common = _correlation(recorded)
    runs = []
    for run in np.array_split(np.arange(num_experts), num_recorded):
        shared, own = rng.standard_normal(len(run)), rng.standard_normal((num_tasks, len(run)))
        order = np.argsort(np.argsort(-(np.sqrt(common) * shared + np.sqrt(1 - common) * own), axis=1), axis=1)
        runs.append(np.stack([zipf(len(run), exponent_of(gini(of_task), len(run))) for of_task in recorded]))
        runs[-1] = np.take_along_axis(runs[-1], order, axis=1)
    found = np.concatenate([part * run for part, run in zip(recorded.T[:, :, None], runs, strict=True)], axis=1)
    return found[:, rng.permutation(num_experts)]


def _correlation(recorded: Floats) -> float:
    """Of the shares of one task with those of another, mean over all pairs, not below 0."""
    num_tasks, is_even = len(recorded), np.ptp(recorded, axis=1) == 0
    if num_tasks < 2 or is_even.any():
        return 0.0
    found = np.corrcoef(recorded)
    return float(np.clip((found.sum() - num_tasks) / (num_tasks * (num_tasks - 1)), 0.0, 1.0))
