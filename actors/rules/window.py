"""Back-pressure on a lossy road: how many batches may be under way to one destination."""

from __future__ import annotations

LIMIT = 2
"""Batches under way without a receipt: one that its receiver is at, and one for it to go on with. What comes meanwhile
is gathered and goes with the next, so whoever falls behind gets fewer and larger messages, which lets it catch up. One
that keeps up gets all at once: a round trip is shorter than a step."""

SILENCE_S = 2.0
"""Receipts can be lost: after so long without one the window opens again."""


class Window:
    """Counts batches sent and receipts got, for one destination. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._heard_s = 0.0

    def may_send(self, now_s: float) -> bool:
        """Is there room for another batch?"""
        if self._num_under_way >= LIMIT and now_s - self._heard_s > SILENCE_S:
            self._num_under_way = 0
        return self._num_under_way < LIMIT

    def is_idle(self, now_s: float) -> bool:
        """All that was sent has its receipt, or will have none."""
        return self._num_under_way == 0 or now_s - self._heard_s > SILENCE_S

    def sent(self, now_s: float) -> None:
        """A batch went out."""
        if self._num_under_way == 0:
            self._heard_s = now_s
        self._num_under_way += 1

    def taken(self, now_s: float) -> None:
        """A receipt came in."""
        self._num_under_way = max(self._num_under_way - 1, 0)
        self._heard_s = now_s
