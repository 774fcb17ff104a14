"""Slabs whose writer is gone for long, and who is to have them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from actors.rules.location import parse_name

ABSENT_S = 60.0
"""How long a writer may be away before its slabs are given to others: a restart takes a few seconds."""


class Orphans:
    """Notes since when writers are away. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._absent_since: dict[str, float] = {}

    def heirs(self, names: Iterable[str], alive: Collection[str], now_s: float) -> list[tuple[str, str]]:
        """(file, writer that is to have it): the files of writers away for ABSENT_S, each to whom has fewest."""
        slabs = [(name, parsed[1]) for name in names if (parsed := parse_name(name)) is not None]
        absent = {writer for _, writer in slabs} - set(alive)
        self._absent_since = {writer: self._absent_since.get(writer, now_s) for writer in sorted(absent)}
        num_slabs = dict.fromkeys(sorted(alive), 0)
        for _, writer in slabs:
            if writer in num_slabs:
                num_slabs[writer] += 1
        given = []
        for name, writer in slabs:
            if num_slabs and now_s - self._absent_since.get(writer, now_s) >= ABSENT_S:
                heir = min(num_slabs, key=lambda id: num_slabs[id])
                num_slabs[heir] += 1
                given.append((name, heir))
        return given
