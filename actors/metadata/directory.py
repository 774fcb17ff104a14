"""Which windows can be pulled where: one hint for each block, good until it expires or its holder is gone."""

from __future__ import annotations

from collections.abc import Callable

from actors.rules import keys as block_keys
from actors.rules.blocks import Flags, Keys
from schemas.cache import Snapshot

MAX_SNAPSHOTS = 200_000
"""Some hundred megabytes."""


class Directory:
    """Snapshots by block key. Times are unix nanoseconds."""

    def __init__(self, max_snapshots: int = MAX_SNAPSHOTS) -> None:
        self._max_snapshots = max_snapshots
        self._snapshots: dict[bytes, Snapshot] = {}  # in the order in which they came
        self._of_holder: dict[str, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._snapshots)

    def keep(self, snapshot: Snapshot, now_ns: int) -> None:
        """It replaces an earlier one of its key; not one that is exact and lives if it is approximate and another's.

        Those that have expired go, the first to come first, and where there are too many so do others.
        """
        known = self._snapshots.get(snapshot.key)
        if known is not None:
            is_worse = snapshot.approximate and not known.approximate and known.holder != snapshot.holder
            if is_worse and known.expires_ns > now_ns:
                return
            self._remove(known)
        if snapshot.expires_ns <= now_ns:
            return
        self._snapshots[snapshot.key] = snapshot
        self._of_holder.setdefault(snapshot.holder, {})[snapshot.key] = None
        while len(self._snapshots) > self._max_snapshots or self._first.expires_ns <= now_ns:
            self._remove(self._first)

    def find(self, key: bytes, now_ns: int) -> Snapshot | None:
        """That of a block; one that has expired is forgotten."""
        known = self._snapshots.get(key)
        if known is not None and known.expires_ns <= now_ns:
            self._remove(known)
            return None
        return known

    def forget(self, holder: str) -> None:
        """It is gone, with all it held. Idempotent."""
        for key in self._of_holder.pop(holder, {}):
            del self._snapshots[key]

    def retain(self, owns: Callable[[Keys], Flags]) -> None:
        """Forget those of keys that are another's."""
        ours = owns(block_keys.keys(b"".join(self._snapshots))).tolist()
        for snapshot, is_ours in zip(list(self._snapshots.values()), ours, strict=True):
            if not is_ours:
                self._remove(snapshot)

    @property
    def _first(self) -> Snapshot:
        return next(iter(self._snapshots.values()))

    def _remove(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.key]
        keys = self._of_holder[snapshot.holder]
        del keys[snapshot.key]
        if not keys:
            del self._of_holder[snapshot.holder]
