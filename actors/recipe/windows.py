"""One window for each destination of streams."""

from __future__ import annotations

from actors.rules.window import Window


class Windows:
    """See `Window`. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}

    def may_send(self, destination: str, now_s: float) -> bool:
        """Is there room for another batch?"""
        return self._windows.setdefault(destination, Window()).may_send(now_s)

    def sent(self, destination: str, now_s: float) -> None:
        """A batch goes out."""
        self._windows.setdefault(destination, Window()).sent(now_s)

    def taken(self, destination: str, now_s: float) -> None:
        """A receipt came."""
        if destination in self._windows:
            self._windows[destination].taken(now_s)

    def drop(self, destination: str) -> None:
        """Nothing more goes there. Idempotent."""
        self._windows.pop(destination, None)
