"""What prefill costs on one engine, as measured on it: a `Cost` that follows what its steps take."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, replace

from actors.rules.cost import PUBLISHED, Cost, Terms, fit

_ENOUGH = 8
"""Steps without which what was given is trusted more than them."""

_REFIT_EVERY = 32
"""Steps; and at each of the first so many."""

_KEPT = 8
"""Steps of each size. A window over all steps would forget long prompts while there are none."""

_RECENT = 16
"""Steps that together say whether the engine is as fast as it was."""

_DRIFT = 1.25
"""So much slower, or faster, is another speed and no error of the model."""

_JUDGED = 64
"""Steps whose errors make the residual."""

_NUM_LOADS = 32


@dataclass(slots=True)
class _Step:
    """The `number`th step: what it computed, and how long that took, or would take at today's speed."""

    number: int
    terms: Terms
    took_ns: float


class Meter:
    """Fits the cost of one engine to its last steps of each size; those that were disturbed are left out.

    Recent steps whose median is far off say that the engine is slower, or faster, than it was: older steps are then
    taken to be so as well, so that what is known of long prompts stays good while only short ones come. Adding a step
    takes microseconds; a fit, once in 32 steps, a fraction of a millisecond.
    """

    def __init__(self, cost: Cost = PUBLISHED) -> None:
        """`cost` is trusted until there are steps enough; its `step_tokens` stay."""
        self.cost = cost
        self._num_steps = 0
        self._sizes: dict[tuple[int, int, bool], deque[_Step]] = {}
        self._loads: deque[tuple[float, float]] = deque(maxlen=_NUM_LOADS)
        self._errors: deque[float] = deque(maxlen=_JUDGED)
        self._slowness: deque[float] = deque(maxlen=_RECENT)  # since the last fit: measured over foretold

    @property
    def residual(self) -> float:
        """The median error of what was foretold of recent steps, each before it was known, as a part of what they took;
        0 before the first, and when what was given has just been replaced by what was measured."""
        return statistics.median(self._errors) if self._errors else 0.0

    def add(self, terms: Terms, took_ns: float) -> None:
        """A step took so long; or, with no `steps` in it, the loading of so many blocks into the engine."""
        took_ns = max(took_ns, 1.0)
        if not terms.steps:
            self._add_load(terms.blocks, took_ns)
            return
        foretold_ns = self.cost.ns(terms)
        self._errors.append(abs(foretold_ns / took_ns - 1))
        self._slowness.append(took_ns / max(foretold_ns, 1.0))
        self._num_steps += 1
        if self._num_steps == _ENOUGH:
            self._errors.clear()  # of what was given: nothing more is foretold by that
        size = (_magnitude(terms.tokens), _magnitude(terms.context), terms.tail_tokens > 0)
        self._sizes.setdefault(size, deque(maxlen=_KEPT)).append(_Step(self._num_steps, terms, took_ns))
        if self._num_steps >= _ENOUGH and (self._has_drifted() or self._is_due()):
            self._refit()

    def _add_load(self, num_blocks: float, took_ns: float) -> None:
        """The median of nanoseconds a block, over all blocks: a short load says little of a long one."""
        if num_blocks <= 0:
            return
        self._loads.append((took_ns / num_blocks, num_blocks))
        left = sum(num for _, num in self._loads) / 2
        for block_ns, num in sorted(self._loads):
            left -= num
            if left <= 0:
                self.cost = replace(self.cost, block_ns=block_ns)
                break

    def _is_due(self) -> bool:
        return self._num_steps <= _REFIT_EVERY or self._num_steps % _REFIT_EVERY == 0

    def _has_drifted(self) -> bool:
        """Whether recent steps agree on another speed; then older ones are made to have it."""
        if len(self._slowness) < _RECENT or 1 / _DRIFT <= statistics.median(self._slowness) <= _DRIFT:
            return False
        # The newer half: the median moves when a little more than half are of the new speed.
        factor = statistics.median(list(self._slowness)[_RECENT // 2 :])
        for step in self._steps():
            if step.number <= self._num_steps - _RECENT // 2:
                step.took_ns *= factor
        return True

    def _refit(self) -> None:
        found = fit([(step.terms, step.took_ns) for step in self._steps()])
        self.cost = replace(found, block_ns=self.cost.block_ns, step_tokens=self.cost.step_tokens)
        self._slowness.clear()

    def _steps(self) -> list[_Step]:
        return [step for steps in self._sizes.values() for step in steps]


def _magnitude(count: float) -> int:
    """Equal for counts that differ by less than a factor of four."""
    return int(count).bit_length() // 2
