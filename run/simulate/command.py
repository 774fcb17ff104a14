"""`shoal simulate`: the policies of balancing, compared on a workload."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from run.cluster import read_cluster
from run.settings import SettingsError
from run.simulate import plots
from run.simulate.agents import WORKLOADS
from run.simulate.arrival import Arrival
from run.simulate.options import POLICIES, Options
from run.simulate.report import report, table
from run.simulate.traces import read_trace
from schemas.message import Role

LOAD = 0.8
NUM_MADE = 12_000
"""Requests of a workload that is made up, where no number is given."""

app = App(name="simulate")
app.command("run.simulate.chaos.command:chaos", name=["chaos", "--chaos"], help="Faults by the thousand.")
app.command("run.simulate.experts:experts", name="experts", help="Wide expert-parallel groups, on paper.")


@app.default
def simulate(
    trace: str = "agents-64k",
    *,
    policies: str = ",".join(POLICIES),
    prefill: int = 16,
    decode: int = 16,
    cluster: Path | None = None,
    load: float | None = None,
    speed: float | None = None,
    requests: int = 0,
    seed: int = 0,
    overlap_weight: float = 1.0,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Compare policies of balancing on a trace of real requests, with the real actors in virtual time.

    Time to first token, slowdown (that, over what the request takes alone), time per output token, waiting, hits, and
    how evenly replicas were busy. The same arguments give the same figures, but for `wall_s`.

    Parameters
    ----------
    trace
        A file, Mooncake's JSON lines or Azure's CSV; or a workload that is made up: agents-32k, agents-48k, agents-64k
        (sessions that call tools, by the length of their contexts), chat, or chat-and-million (the same chat, with one
        prompt of a million tokens amid it).
    policies
        Which, with commas between: quota (nanoseconds of work left: ours), requests (how many are left), round-robin,
        tokens (how many are left), affinity (the longest cached prefix, against the load).
    prefill
        Prefill replicas.
    decode
        Decode replicas.
    cluster
        Take the numbers of prefill and decode replicas from this cluster file.
    load
        What part of the time prefill would be busy if requests were spread evenly, 0.8 by default: the times of a trace
        are stretched or shrunk for it.
    speed
        In place of --load: play a trace this many times faster than it was.
    requests
        The first so many of a trace, all of them by default; of a workload that is made up, 12,000 by default.
    seed
        Of noise, replicas' speeds and workloads that are made up.
    overlap_weight
        What a cached block counts against load, for affinity.
    json
        Print one JSON object in place of a table.
    plot
        Draw it too, into this PNG file. Needs matplotlib: pip install -e '.[plots]'.
    """
    began_s = time.monotonic()
    if plot is not None:
        plots.check(plot)
    if cluster is not None:
        prefill, decode = _replicas(cluster)
    options = Options(_names(policies), prefill, decode, LOAD if load is None else load, seed, overlap_weight)
    _check(options, requests)
    if speed is not None:
        if load is not None or not 0 < speed < inf or trace in WORKLOADS:
            raise SettingsError(f"--speed {speed:g}: a number above 0, without --load, and for a trace only")
        options = replace(options, load=None)

    from run.simulate.runner import simulate as run  # brings all actors with it

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        reading = bars.add_task(Path(trace).name, total=1.0)
        arrivals, options = _workload(trace, options, requests, lambda done: bars.update(reading, completed=done))
        if speed is not None:
            arrivals = [replace(arrival, at_s=arrival.at_s / speed) for arrival in arrivals]
        tasks = {name: bars.add_task(name, total=1.0) for name in options.policies}
        results = run(arrivals, options, lambda name, done: bars.update(tasks[name], completed=done))
    found = report(results, time.monotonic() - began_s)
    title = f"{Path(trace).name}: {len(arrivals):,} requests on {prefill} + {decode} replicas"
    if json:
        print(json_module.dumps(found))
    else:
        Console().print(table(found, title))
    if plot is not None:
        plots.plot(results, title, plot)


def _names(policies: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise SettingsError(f"--policies {policies}: choose from {', '.join(POLICIES)}, with commas between")
    return names


def _replicas(cluster: Path) -> tuple[int, int]:
    """How many prefill and decode replicas a cluster file names."""
    roles = [member.role for spec in read_cluster(cluster) for member in spec.members]
    return roles.count(Role.PREFILL), roles.count(Role.DECODE)


def _check(options: Options, requests: int) -> None:
    if options.num_prefill < 1 or options.num_decode < 1:
        raise SettingsError(f"--prefill {options.num_prefill}, --decode {options.num_decode}: at least one of each")
    if options.load is not None and not 0 < options.load <= 10:
        raise SettingsError(f"--load {options.load:g}: a part of prefill's time, above 0 and at most 10, such as 0.8")
    if requests < 0 or options.overlap_weight < 0:
        raise SettingsError("--requests and --overlap-weight may not be negative")


def _workload(
    trace: str, options: Options, requests: int, progress: Callable[[float], None]
) -> tuple[list[Arrival], Options]:
    """The requests, and the options for them: what is made up is made for its load."""
    made = WORKLOADS.get(trace)
    if made is not None and options.load is not None:
        arrivals = made(requests or NUM_MADE, options.load * options.num_prefill * 1e9, options.seed)
        progress(1.0)
        return arrivals, replace(options, load=None)
    path = Path(trace)
    if not path.is_file():
        raise SettingsError(f"{trace}: neither a file nor one of {', '.join(WORKLOADS)}")
    return read_trace(path, requests, progress), options
