"""What a vision replica holds for others: how much of it there is, and until when."""

from __future__ import annotations

MAX_HELD_BYTES = 512 * 1024 * 1024
"""Pixels and embeddings on offer. Less than a process may hold for others in all: it may be prefill's, too."""


class Held:
    """Sizes by key. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sizes: dict[str, tuple[int, float]] = {}

    def has_room(self, num_bytes: int, now_s: float) -> bool:
        """Whether so much more may be held. What has expired is forgotten."""
        for key in [key for key, (_, until_s) in self._sizes.items() if until_s <= now_s]:
            self.remove(key)
        return self.num_bytes + num_bytes <= MAX_HELD_BYTES

    def is_empty(self, now_s: float) -> bool:
        """Nothing is held that may still be pulled."""
        return all(until_s <= now_s for _, until_s in self._sizes.values())

    def add(self, key: str, num_bytes: int, until_s: float) -> None:
        """It is on offer now."""
        self._sizes[key] = (num_bytes, until_s)
        self.num_bytes += num_bytes

    def remove(self, key: str) -> None:
        """It is not any more. Idempotent."""
        self.num_bytes -= self._sizes.pop(key, (0, 0.0))[0]
