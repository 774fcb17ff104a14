"""`shoal simulate chaos`: thousands of fault scripts, each run on the real actors; what broke, and by how little."""

from __future__ import annotations

import json as json_module
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bus.server import die_with_parent
from run.settings import SettingsError
from run.simulate.chaos import chance
from run.simulate.chaos.history import History, run
from run.simulate.chaos.script import Script, read, text
from run.simulate.chaos.shrink import shrink

NUM_AT_ONCE = 10
"""Seeds that a process is given at a time."""

TOLD_EVERY = 1000
"""Seeds, where nobody sees a bar."""

MOST_SHRUNK = 10
"""Scripts that are made small, of those that broke something: each takes seconds."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A seed that broke a rule: which, how, when; and the least script that breaks it, empty if it was not sought."""

    seed: int
    kind: str
    text: str
    at_s: float
    script: str = ""


def chaos(
    *,
    seeds: int = 2000,
    first: int = 0,
    seed: int | None = None,
    script: Path | None = None,
    processes: int = 0,
    json: bool = False,
) -> int:
    """Make trouble for a small system by chance, thousands of times, and see whether it keeps what it promises.

    Each seed is a script: requests, and faults such as lost, doubled and late messages, actors cut off, killed, stopped
    or slow, a disk that errs, a broker that restarts. It is run on the real actors in virtual time, and always in the
    same way. Of a seed that breaks a rule, the least script that does so is printed. Exits with 1 if there was any.

    Parameters
    ----------
    seeds
        How many.
    first
        The first of them.
    seed
        This one only, whatever else is said; its history is told.
    script
        In place of a seed: a script from this file, as they are printed.
    processes
        At a time; as many as there are cores by default.
    json
        Print one JSON object: {"seeds", "events", "violations", "wall_s", "broken"}.
    """
    began_s = time.monotonic()
    if seeds < 1 or min(processes, first, seed or 0) < 0:
        raise SettingsError("--seeds has to be 1 or more; --first, --seed and --processes may not be negative")
    console = Console(stderr=True)
    if script is not None or seed is not None:
        num, found = 1, iter([_one(_read(script) if script is not None else chance.script(seed or 0), console)])
    else:
        num, found = seeds, _many(range(first, first + seeds), processes or os.cpu_count() or 1, console)
    num_events, broken = 0, list[Broken]()
    for events, some in found:
        num_events += events
        broken += some
        for one in some:
            _tell(one, console)
    broken.sort(key=lambda one: one.seed)
    wall_s = time.monotonic() - began_s
    if json:
        told = {"seeds": num, "events": num_events, "violations": len(broken), "wall_s": round(wall_s, 2)}
        print(json_module.dumps({**told, "broken": msgspec.to_builtins(broken)}))
    else:
        rate = f"{num / wall_s:.1f} a second"
        print(f"{num:,} seeds, {num_events:,} messages, {len(broken):,} violations in {wall_s:.1f} s, {rate}")
    return int(bool(broken))


def _read(path: Path) -> Script:
    try:
        return read(path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{path} is no script: {error}") from None


def _tell(one: Broken, console: Console) -> None:
    console.print(f"[red]seed {one.seed}[/] after {one.at_s:.3f} s, {one.kind}: ", end="")
    console.print(one.text, markup=False, highlight=False, soft_wrap=True)
    if one.script:
        console.print(one.script, markup=False, highlight=False, soft_wrap=True)


def _one(script: Script, console: Console) -> tuple[int, list[Broken]]:
    """Run one, and say how it went."""
    history = run(script)
    ends = ", ".join(f"{number} {end}" for end, number in sorted(history.ends.items()))
    console.print(f"{len(script.asks)} requests, {len(script.faults)} faults; {history.virtual_s:.3f} s; {ends}")
    console.print(f"history {history.digest}", soft_wrap=True)
    return history.num_events, _broken(script, history, can_shrink=True)


def _many(seeds: range, processes: int, console: Console) -> Iterator[tuple[int, list[Broken]]]:
    """Run them in several processes; (messages, what broke) of some at a time."""
    parts = [seeds[at : at + NUM_AT_ONCE] for at in range(0, len(seeds), NUM_AT_ONCE)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    num_done = num_broken = 0
    with (
        Progress(*columns, console=console, transient=True) as bars,
        _pool(processes) as pool,
    ):
        bar, futures = bars.add_task("seeds", total=len(seeds)), {pool.submit(_some, part): part for part in parts}
        for done in as_completed(futures):
            num_events, histories = done.result()
            broken = list[Broken]()
            for seed, history in histories.items():
                broken += _again(seed, history, can_shrink=num_broken + len(broken) < MOST_SHRUNK)
            before, num_done, num_broken = num_done, num_done + len(futures[done]), num_broken + len(broken)
            bars.update(bar, completed=num_done, description=f"seeds, {num_broken} broken" if num_broken else "seeds")
            if not console.is_terminal and before // TOLD_EVERY < num_done // TOLD_EVERY:
                console.print(f"{num_done} seeds, {num_broken} broken", highlight=False)
            yield num_events, broken


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Ends at once when what uses it fails, as by Ctrl-C: histories that nobody waits for are not gone through."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (die_with_parent(),)) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _begin(die_with_parent: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: meant for the parent
    die_with_parent()


def _some(seeds: Sequence[int]) -> tuple[int, dict[int, History]]:
    """In a process of its own: how many messages these had, and the histories of those that broke something."""
    histories = {seed: run(chance.script(seed)) for seed in seeds}
    num_events = sum(history.num_events for history in histories.values())
    return num_events, {seed: history for seed, history in histories.items() if history.violation is not None}


def _again(seed: int, history: History, *, can_shrink: bool) -> list[Broken]:
    """What a seed broke, seen once more: a history that is another one then is worse than what it broke."""
    script = chance.script(seed)
    if (digest := run(script).digest) != history.digest:
        return [Broken(seed, "determinism", f"histories of this seed are {history.digest} and {digest}", 0.0)]
    return _broken(script, history, can_shrink=can_shrink)


def _broken(script: Script, history: History, *, can_shrink: bool) -> list[Broken]:
    """The violation, with the least script that has one of its kind; none if there was none."""
    violation = history.violation
    if violation is None:
        return []

    def fails(some: Script) -> bool:
        found = run(some).violation
        return found is not None and found.kind == violation.kind

    least = text(shrink(script, fails)) if can_shrink else ""
    return [Broken(script.seed, violation.kind, violation.text, violation.at_s, least)]
