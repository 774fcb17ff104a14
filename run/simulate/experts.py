"""`shoal simulate experts`: wide groups on paper, their experts placed by the balancer's own functions."""

from __future__ import annotations

import json as json_module
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console

from run.settings import Settings, SettingsError
from run.simulate.experts_report import tables
from run.simulate.group import Group
from run.simulate.lockstep import Machine, Sizes
from run.simulate.routing import Recorded
from run.simulate.steady import steady
from run.simulate.timeline import timeline
from run.simulate.traffic import WORKLOADS

MACHINE = Machine()
WATCHED = ("recorded", "zipf-1")
"""Workloads that are followed over time, and change half way."""

WATCHED_EP = 64
"""Sizes of groups from here on are followed over time."""


def experts(
    *,
    ep: str = "1,8,32,64,128",
    rows: str = "8,32,128",
    layers: int = 2,
    redundant: int = 32,
    context: int = 32_768,
    seed: int = 0,
    machine: Annotated[Machine, Parameter(name="*")] = MACHINE,
    json: bool = False,
    record: Path | None = None,
) -> None:
    """Decode in wide groups of the published model, on paper: weights read, steps in lock-step, experts that move.

    Which experts rows ask for is made up, some of it after what the bundled model's router was seen to do; times are
    computed from the sizes and speeds below. Where experts go is what the balancer would say. The same arguments give
    the same figures, but for `wall_s`.

    Parameters
    ----------
    ep
        Sizes of groups, with commas between.
    rows
        Rows of each rank in a step, with commas between. Experts are placed after loads of the most.
    layers
        How many layers are simulated, each for as many of the model's 40.
    redundant
        Copies of experts in a layer, at least; none in a group of one.
    context
        Tokens that each row's request has behind it.
    seed
        Of all that is drawn.
    json
        Print one JSON object in place of tables.
    record
        Simulate nothing: run SHOAL_MODEL, the bundled one by default, on held-out prompts, and write to this file what
        its router does.
    """
    if record is not None:
        _record(record)
        return
    began_s = time.monotonic()
    sizes, own_rows = _numbers("--ep", ep), _numbers("--rows", rows)
    for name, value in {**asdict(machine), "context": context, "layers": layers}.items():
        most = 1.0 if name == "reached" else 1e9
        if not 0 < value <= most:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: give a number above 0, and at most {most:g}")
    if min(redundant, seed) < 0:
        raise SettingsError(f"--redundant {redundant} --seed {seed}: give 0 or more")
    groups = [
        Group(size, max(own_rows), layers, redundant if size > 1 else 0, context, seed, Sizes(), machine)
        for size in sizes
    ]
    try:
        found = simulate(groups, own_rows, Recorded.read())
    except ValueError as error:  # more copies than ranks have room for
        raise SettingsError(str(error)) from None
    found["wall_s"] = round(time.monotonic() - began_s, 2)
    if json:
        print(json_module.dumps(found))
        return
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for table in tables(found):
        console.print(table)


def simulate(groups: list[Group], rows: list[int], recorded: Recorded) -> dict[str, Any]:
    """What `groups` do under all workloads, and the larger ones over time."""
    one = groups[0]
    return {
        "assumed": {**asdict(one.machine), **asdict(one.sizes), "context": one.context},
        "simulated_layers": one.num_layers,
        "recorded": {"model": recorded.model, "rows": sum(recorded.num_rows)},
        "steady": [row for name in WORKLOADS for group in groups for row in steady(group, name, recorded, rows)],
        "moving": [
            timeline(group, name, recorded) for name in WATCHED for group in groups if group.ep_size >= WATCHED_EP
        ],
    }


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise SettingsError(f"{option} {text}: numbers above 0, with commas between")
    return found


def _record(file: Path) -> None:
    from run.simulate.recording import record  # brings torch with it

    folder = Settings.from_environment().model
    try:
        file.open("ab").close()  # what cannot be written is told before, not after
        found = record(folder, told=lambda task: print(task, file=sys.stderr))
    except (OSError, ValueError) as error:
        raise SettingsError(f"--record {file}: {error}") from None
    file.write_bytes(msgspec.json.encode(found) + b"\n")
