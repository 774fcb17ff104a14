"""A cluster file that is changed while its cluster runs: which processes leave, and which are started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from run.cluster import ClusterError, ProcessSpec
from run.settings import SettingsError
from schemas.message import Role

LOOK_S = 1.0
FIXED = frozenset({Role.GATEWAY, Role.METADATA, Role.KVSTORE, Role.WRITER, Role.QUOTA, Role.EXPERT_BALANCER})
"""Clients are connected to the one, and files and limits belong to the others."""


@dataclass(frozen=True)
class Change:
    """What is done about it, in this order: some are started, some leave, and those that take their places are started.

    `specs` is the whole cluster afterwards.
    """

    first: tuple[ProcessSpec, ...]
    leaving: tuple[ProcessSpec, ...]
    then: tuple[ProcessSpec, ...]
    specs: tuple[ProcessSpec, ...]

    @classmethod
    def between(cls, running: Sequence[ProcessSpec], wanted: Sequence[ProcessSpec]) -> Change:
        """Processes are told apart by their names. What goes on keeps its number of threads: in a file without them
        that is a share, and all would have to begin anew for each that comes.

        Raises ClusterError, which names a process that cannot be changed now.
        """
        known = {spec.name: spec for spec in running}
        wanted = [_as_it_runs(spec, known.get(spec.name)) for spec in wanted]
        coming = [spec for spec in wanted if known.get(spec.name) != spec]
        leaving = [spec for spec in running if spec not in wanted]
        for spec in leaving + coming:
            fixed = [str(member) for member in spec.members if member.role in FIXED]
            if fixed or spec.group is not None:
                what = f"one with {fixed[0]}" if fixed else "a group"
                raise ClusterError(f"{spec.name}: {what} cannot be changed while it runs; start `shoal up` anew")
        taken = {spec.name for spec in leaving} | {member for spec in leaving for member in spec.members}
        then = [spec for spec in coming if spec.name in taken or taken & set(spec.members)]
        first = [spec for spec in coming if spec not in then]
        return cls(tuple(first), tuple(leaving), tuple(then), tuple(wanted))

    @property
    def is_none(self) -> bool:
        """Nothing is to be done."""
        return not self.first and not self.leaving and not self.then


def _as_it_runs(spec: ProcessSpec, known: ProcessSpec | None) -> ProcessSpec:
    """The same but for what a file does not say of it: the threads it was given."""
    if known is None:
        return spec
    same = replace(spec, num_threads=known.num_threads)
    return same if same == known else spec


async def follow(
    path: Path,
    change: Callable[[], Change],
    carry_out: Callable[[Change], Awaitable[None]],
    say: Callable[[str], None],
) -> None:
    """Carry out what changes in the file, for ever. It is read when it has been the same for two looks, so that one
    that is being written is left alone. `change` raises ClusterError, SettingsError and OSError."""
    done, seen = (-1, -1, -1), _stamp(path)  # it may have changed since the start was made from it
    while True:
        await asyncio.sleep(LOOK_S)
        now = _stamp(path)
        if now != seen or now == done:
            seen = now
            continue
        done = now
        try:
            wanted = change()
        except (ClusterError, SettingsError, OSError) as error:
            say(f"nothing is changed: {error}")
            continue
        if not wanted.is_none:
            await carry_out(wanted)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Another one whenever the file was written."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
