"""The least of a script that still breaks the same rule: delta debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs

from run.simulate.chaos.script import Script

E = TypeVar("E")

Fails = Callable[[Script], bool]


def shrink(script: Script, fails: Fails) -> Script:
    """Take events away as long as it still fails: first faults, then requests, then faults once more."""
    script = structs.replace(
        script, faults=least(script.faults, lambda some: fails(structs.replace(script, faults=some)))
    )
    script = structs.replace(script, asks=least(script.asks, lambda some: fails(structs.replace(script, asks=some))))
    return structs.replace(
        script, faults=least(script.faults, lambda some: fails(structs.replace(script, faults=some)))
    )


def least(events: Sequence[E], fails: Callable[[list[E]], bool]) -> list[E]:
    """A part, in order, that fails, and fails no more when any one of it is taken away. `events` fail."""
    events, size = list(events), max(1, len(events) // 2)
    if events and fails([]):
        return []
    while events:
        for first in range(0, len(events), size):
            rest = events[:first] + events[first + size :]
            if len(rest) < len(events) and rest and fails(rest):
                events = rest
                break
        else:
            if size == 1:
                break
            size //= 2
            continue
        size = min(size, max(1, len(events) // 2))
    return events
