"""How long passes of an engine take, by how many rows they have: learned from those that were. Free of torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_NUM_KEPT = 15  # of each range of sizes: so many of the last passes
_NUM_NEEDED = 3  # of them make a median that one odd pass does not move
_PER_OCTAVE = 4  # ranges of sizes from one to its double
_NEAR = 1.5  # as far, as a factor, a size that was measured tells of others


class StepTimes:
    """The time of a pass by its size, a number of rows or of requests. Never less for more.

    Sizes fall into ranges, four to a doubling; of each the last few passes count, by their median, and what noise makes
    fall from one range to the next is levelled. So it follows slow changes, and a pass that was held up does no harm.
    """

    def __init__(self) -> None:
        self._passes: dict[int, deque[tuple[int, float]]] = {}
        self._known: dict[int, tuple[float, float]] = {}  # size and time of each range that enough is known of
        self._changed: set[int] = set()  # ranges with passes that are not counted in yet
        self._table: tuple[Floats, Floats] | None = None

    def add(self, size: int, took_s: float) -> None:
        """A pass of so many rows, one or more, took that long."""
        part = round(_PER_OCTAVE * math.log2(size))
        self._passes.setdefault(part, deque(maxlen=_NUM_KEPT)).append((size, took_s))
        self._changed.add(part)

    def knows(self, size: int) -> bool:
        """Whether passes of about that size were measured."""
        self._count()
        return any(known <= size * _NEAR and known * _NEAR >= size for known, _ in self._known.values())

    def at(self, sizes: npt.NDArray[np.int64]) -> Floats:
        """Seconds for each of `sizes`, ascending with them: along straight lines between those measured, as for the
        smallest below it, and beyond the largest along the line through both. Only once one was measured."""
        self._count()
        if self._table is None:
            known, times = zip(*(one for _, one in sorted(self._known.items())), strict=True)
            self._table = np.array(known), _rising(times)
        xs, ys = self._table
        found = np.interp(sizes, xs, ys)
        if sizes[-1] > xs[-1]:
            span = xs[-1] - xs[0]
            row_s = (ys[-1] - ys[0]) / span if span else ys[-1] / xs[-1]
            found += row_s * np.maximum(sizes - xs[-1], 0.0)
        return np.asarray(found, dtype=np.float64)

    def _count(self) -> None:
        """Late, as most steps ask nothing."""
        for part in self._changed:
            passes = self._passes[part]
            if len(passes) >= _NUM_NEEDED:
                sizes, times = zip(*passes, strict=True)
                self._known[part] = (sum(sizes) / len(sizes), statistics.median(times))
                self._table = None
        self._changed.clear()


def _rising(values: Sequence[float]) -> Floats:
    """The nearest values (least squares) that do not fall: those that do are replaced by their mean."""
    means: list[tuple[float, int]] = []
    for value in values:
        num = 1
        while means and means[-1][0] > value:
            before, num_before = means.pop()
            value, num = (before * num_before + value * num) / (num_before + num), num_before + num
        means.append((value, num))
    return np.repeat([mean for mean, _ in means], [num for _, num in means]).astype(np.float64)
