"""How a replica leaves (design §6): a state machine, without tasks, messages, or a clock of its own.

    SERVING → DRAINING → MOVING → GIVING_BACK → GONE

While it drains, its requests go on. At the end of the grace they are frozen, a few at a time: each is taken out of the
batch between two steps and offered to another replica, which claims it or does not; the others go on until it is their
turn. What nobody took, or not in time, is given back, and its entrypoint has it computed anew from what is cached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

AT_ONCE = 4
"""Frozen at the same time. A stream pauses for its own move, and no longer because of those before it."""

MOVING_S = 8.0
"""From the end of the grace until all that is left is given back."""


class Stage(StrEnum):
    """Where a replica is on its way out. GONE: nothing is held any more."""

    SERVING = "serving"
    DRAINING = "draining"
    MOVING = "moving"
    GIVING_BACK = "giving back"
    GONE = "gone"


class Fate(StrEnum):
    """What became of a frozen request: another replica owns it; its entrypoint has it again; it has ended."""

    MOVED = "moved"
    GIVEN_BACK = "given back"
    ENDED = "ended"


class Grace:
    """One replica's. Times are seconds of the caller's clock.

    Every frozen request is settled exactly once, and no more than `at_once` are frozen before the last stage. The
    replica is GONE within the grace, `moving_s`, and what its last offers take to be called off.
    """

    def __init__(self, *, at_once: int = AT_ONCE, moving_s: float = MOVING_S) -> None:
        self.counts = dict.fromkeys(Fate, 0)
        self.pauses_s: list[float] = []
        """Of those that were moved: from the freeze to the word that another replica owns it."""
        self._at_once = at_once
        self._moving_s = moving_s
        self._end_s = math.inf
        self._frozen: dict[str, float] = {}

    def drain(self, now_s: float, grace_s: float) -> None:
        """Begin, or leave sooner than was said before."""
        self._end_s = min(self._end_s, now_s + grace_s)

    def stage(self, num_held: int, now_s: float) -> Stage:
        """With so many requests here, frozen ones among them or not."""
        if self._end_s == math.inf:
            return Stage.SERVING
        if not num_held and not self._frozen:
            return Stage.GONE
        if now_s < self._end_s:
            return Stage.DRAINING
        return Stage.MOVING if self.left_s(now_s) > 0 else Stage.GIVING_BACK

    def left_s(self, now_s: float) -> float:
        """For how long requests may still be offered to others."""
        return max(self._end_s + self._moving_s - now_s, 0.0)

    def freeze(self, running: Sequence[str], now_s: float) -> list[str]:
        """Those of the running requests whose turn it is: they take no part in steps from now on."""
        if now_s < self._end_s:
            return []
        waiting = [id for id in running if id not in self._frozen]
        chosen = waiting if not self.left_s(now_s) else waiting[: max(self._at_once - len(self._frozen), 0)]
        self._frozen |= dict.fromkeys(chosen, now_s)
        return chosen

    def settle(self, request_id: str, fate: Fate, now_s: float) -> bool:
        """What became of a frozen one. False, and nothing changes, if that is known already."""
        frozen_s = self._frozen.pop(request_id, None)
        if frozen_s is None:
            return False
        self.counts[fate] += 1
        if fate is Fate.MOVED:
            self.pauses_s.append(now_s - frozen_s)
        return True
