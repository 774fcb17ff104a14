"""`shoal train`: the training of the bundled model, in pieces that go on exactly where the last one stopped."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cyclopts
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from run.train.state import RunFolder
    from run.train.trainer import Report, Trainer

app = cyclopts.App(name="train", help="Train shoal-tiny on this machine's CPU, in resumable pieces.")

_SAVE_S = 180.0
_LOG_STEPS = 20


@app.default
def train(folder: Path, *, minutes: float = 90, seed: int = 1, processes: int = 2) -> int:
    """Train, or go on training, in FOLDER; its model is in FOLDER/model, and can be served: SHOAL_MODEL=FOLDER/model.

    The same seed, steps and number of processes give the same model, however often the run was stopped. The state is
    saved every three minutes, and on Ctrl-C. FOLDER/log.jsonl is the log.

    Parameters
    ----------
    folder
        Of the run; made if it is not there.
    minutes
        Stop after this many; the whole plan takes about five hours on two cores.
    seed
        Of a new run: of the first weights, and of all that is trained on.
    processes
        Each of one thread, with its share of the rows of a batch: quicker than threads for products this small.
    """
    from torch.multiprocessing.spawn import spawn

    from run.train.state import RunFolder

    RunFolder(folder).prepare()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes save, then end
    try:
        spawn(_work, (processes, address, folder, minutes * 60, seed), processes)
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def _work(rank: int, world: int, address: str, folder: Path, seconds: float, seed: int) -> None:
    """One of the processes that train together; the first one saves."""
    import torch
    from torch import distributed

    from run.train import layers
    from run.train.curriculum import PLAN
    from run.train.parameters import write
    from run.train.state import RunFolder
    from run.train.trainer import Trainer

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    layers.fuse()
    run = RunFolder(folder)
    trainer = Trainer(run.model, PLAN, seed)
    state = run.load()
    if state is not None:
        trainer.load(state)
    if rank == 0:
        run.truncate_log(trainer.step)
    _run(trainer, run if rank == 0 else None, seconds)
    if rank == 0:
        run.save(trainer.state())
        write(run.model, trainer.parameters, trainer.config)
        print(f"{trainer.step} of {PLAN.num_steps} steps; the model is in {run.model}")
    distributed.destroy_process_group()


def _run(trainer: Trainer, run: RunFolder | None, seconds: float) -> None:
    """Steps until the time is over, Ctrl-C or the end of the plan; with `run` also the log, the state and the bar."""
    saved = time.monotonic()
    until, stops = saved + seconds, []
    signal.signal(signal.SIGINT, lambda *_: stops.append(True))
    columns = (
        TextColumn("{task.fields[stage]}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.3f} right {task.fields[right]:.1%}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    reports: list[Report] = []
    with Progress(*columns, disable=run is None, speed_estimate_period=600) as bar:
        total = trainer.plan.num_steps
        line = bar.add_task("", total=total, completed=trainer.step, stage="", loss=0.0, right=0.0, speed=0.0)
        for report in trainer.run(lambda: bool(stops) or time.monotonic() > until):
            if run is None:
                continue
            reports.append(report)
            if len(reports) == _LOG_STEPS:
                run.log(reports)
                bar.update(line, **_figures(reports))
                reports = []
            bar.update(line, completed=trainer.step)
            if time.monotonic() - saved > _SAVE_S:
                run.save(trainer.state())
                saved = time.monotonic()


def _figures(reports: list[Report]) -> dict[str, Any]:
    num, took_s = len(reports), sum(one.took_s for one in reports)
    return {
        "stage": reports[-1].stage,
        "loss": sum(one.loss for one in reports) / num,
        "right": sum(one.right for one in reports) / num,
        "speed": sum(one.num_tokens for one in reports) / took_s,
    }
