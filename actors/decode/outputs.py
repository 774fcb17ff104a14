"""How long the outputs of a replica usually are."""

from __future__ import annotations

MEMORY = 128
"""Outputs that the mean goes back to, about."""

OUTLIER = 8.0
"""An output counts as at most so many times the mean: one that ran away moves it little."""


class OutputLength:
    """A running mean of the tokens of outputs. The first ones count alike, later an older one counts less."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._num_seen = 0

    def add(self, num_tokens: int) -> None:
        """An output has ended."""
        self._num_seen += 1
        counted = min(num_tokens, OUTLIER * max(self.mean, 1.0)) if self._num_seen > 1 else num_tokens
        self.mean += (counted - self.mean) / min(self._num_seen, MEMORY)
