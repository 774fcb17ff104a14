"""How long passes of an engine take, by how many rows they have: learned from those that were. Free of torch."""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_NUM_KEPT = 15  # of each range of sizes: so many of the last passes
_NUM_NEEDED = 3  # of them make a median that one odd pass does not move
_PER_OCTAVE = 2  # ranges of sizes from one to its double
_NEAR = 1.5  # as far, as a factor, a size that was measured tells of others


class StepTimes:
    """The time of a pass by its size, a number of rows or of requests. Never less for more.

    Sizes fall into ranges, two to a doubling; of each the last few passes count, by their median, and what noise makes
    fall from one range to the next is levelled. So it follows slow changes, and a pass that was held up does no harm.
    """

    def __init__(self) -> None:
        self._passes: dict[int, deque[tuple[int, float]]] = {}
        self._sizes, self._times = np.empty(0), np.empty(0)

    def add(self, size: int, took_s: float) -> None:
        """A pass of so many rows, one or more, took that long."""
        part = round(_PER_OCTAVE * float(np.log2(size)))
        self._passes.setdefault(part, deque(maxlen=_NUM_KEPT)).append((size, took_s))
        known = [passes for _, passes in sorted(self._passes.items()) if len(passes) >= _NUM_NEEDED]
        self._sizes = np.array([statistics.fmean(size for size, _ in passes) for passes in known])
        self._times = _rising([statistics.median(took for _, took in passes) for passes in known])

    def knows(self, size: int) -> bool:
        """Whether passes of about that size were measured."""
        near = (self._sizes <= size * _NEAR) & (self._sizes * _NEAR >= size)
        return bool(near.any())

    def at(self, sizes: npt.NDArray[np.int64]) -> Floats:
        """Seconds for each of `sizes`, ascending with them: along straight lines between those measured, as for the
        smallest below it, and beyond the largest along the line through both. Only once one was measured."""
        first_s, last_s = self._times[0], self._times[-1]
        span = self._sizes[-1] - self._sizes[0]
        row_s = (last_s - first_s) / span if span else last_s / self._sizes[-1]
        beyond = np.maximum(sizes - self._sizes[-1], 0.0)
        return np.asarray(np.interp(sizes, self._sizes, self._times) + row_s * beyond, dtype=np.float64)


def _rising(values: list[float]) -> Floats:
    """The nearest values (least squares) that do not fall: those that do are replaced by their mean."""
    means: list[tuple[float, int]] = []
    for value in values:
        num = 1
        while means and means[-1][0] > value:
            before, num_before = means.pop()
            value, num = (before * num_before + value * num) / (num_before + num), num_before + num
        means.append((value, num))
    return np.repeat([mean for mean, _ in means], [num for _, num in means]).astype(np.float64)
