"""Back-pressure on a lossy road: one batch at a time is under way to a destination."""

from __future__ import annotations

SILENCE_S = 0.5
"""Receipts can be lost: after so long without one the window opens again."""


class Window:
    """Whether the next batch may go to one destination: when all that went there has its receipt.

    What comes meanwhile is gathered and goes with the next batch. A receiver that keeps up gets all at once, as a round
    trip is shorter than a step; one that falls behind gets fewer and larger messages, which lets it catch up. Times are
    seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._num_under_way = 0
        self._heard_s = 0.0

    def may_send(self, now_s: float) -> bool:
        """All that was sent has its receipt, or will have none."""
        if now_s - self._heard_s > SILENCE_S:
            self._num_under_way = 0
        return self._num_under_way == 0

    def sent(self, now_s: float) -> None:
        """A message of the batch went out."""
        if self._num_under_way == 0:
            self._heard_s = now_s
        self._num_under_way += 1

    def taken(self, now_s: float) -> None:
        """A receipt came in."""
        self._num_under_way = max(self._num_under_way - 1, 0)
        self._heard_s = now_s
