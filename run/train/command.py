"""`shoal train`: the training of the bundled model, in pieces that go on exactly where the last one stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cyclopts
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from run.settings import SettingsError

if TYPE_CHECKING:
    from run.train.plan import Plan
    from run.train.state import RunFolder
    from run.train.steps import Steps

app = cyclopts.App(name="train")

_SAVE_S = 180.0
_LOG_STEPS = 20
_TELL_S = 0.5
_REFUSED = 3
"""How a process ends that cannot go on from the state there is."""
_BACKBONE, _DRAFTS = ("state.pt", "log.jsonl"), ("drafts.pt", "drafts.jsonl")


@app.default
def train(folder: Path, *, minutes: float = 90, seed: int = 1, processes: int = 2) -> int:
    """Train shoal-tiny on this machine's CPU, or go on training it, in FOLDER.

    The same seed, steps and number of processes give the same model, however often the run was stopped. The state is
    saved every few minutes, and in the end or on Ctrl-C, when the model is written too: to FOLDER/model, which can be
    served (SHOAL_MODEL=FOLDER/model). FOLDER/log.jsonl is the log. Draft stages begin anew: train them last.

    Parameters
    ----------
    folder
        Of the run; made if it is not there.
    minutes
        Stop after this many; the whole plan takes about three hours on two cores.
    seed
        Of a new run: of the first weights, and of all that is trained on.
    processes
        1 or 2, each of one thread, with its share of the rows of a batch: quicker than threads for products this small.
    """
    from run.train.curriculum import PLAN
    from run.train.state import RunFolder

    _check(PLAN, minutes, processes)
    run = RunFolder(folder, *_BACKBONE)
    try:
        run.prepare()
    except OSError as error:
        return _refused(error)
    return _spawn(run, minutes, seed, processes, is_drafts=False).status


@app.command
def drafts(folder: Path, *, minutes: float = 30, seed: int = 1, processes: int = 2, num: int = 30) -> int:
    """Train the draft stages for the model in FOLDER/model, which otherwise stays as it is; then calibrate them.

    They learn to say what the model says. The state is FOLDER/drafts.pt, the log FOLDER/drafts.jsonl. Calibrating
    answers prompts that nothing was trained on, and writes confidence_temperatures to the model's shoal.json.

    Parameters
    ----------
    folder
        Of a run of `shoal train`.
    minutes
        Stop training after this many; the whole plan takes about half an hour on two cores.
    seed
        Of new drafts.
    processes
        1 or 2, each of one thread, with its share of the rows of a batch.
    num
        Prompts of each task to calibrate with.
    """
    from run.train.curriculum import DRAFTS
    from run.train.state import RunFolder

    _check(DRAFTS, minutes, processes)
    if num < 1:
        raise SettingsError(f"--num {num}: must be positive")
    run = RunFolder(folder, *_DRAFTS)
    if not run.has_model:
        print(f"shoal: there is no model in {run.model}: shoal train {folder}", file=sys.stderr)
        return 1
    ended = _spawn(run, minutes, seed, processes, is_drafts=True)
    if ended.was_stopped:
        print("the drafts are not calibrated; the same command goes on, and does that in the end")
    elif not ended.status:
        _calibrate(run.model, num)
    return ended.status


def _check(plan: Plan, minutes: float, processes: int) -> None:
    if not minutes > 0:
        raise SettingsError(f"--minutes {minutes:g}: must be positive")
    if processes not in plan.shares:
        known = " or ".join(map(str, plan.shares))
        raise SettingsError(f"--processes {processes}: they share the rows of every batch alike; there can be {known}")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise SettingsError(f"training compiles a part of the model: there is no {compiler}; install it, or set CXX")


def _refused(error: OSError) -> int:
    print(f"shoal: {error.filename}: {error.strerror}", file=sys.stderr)
    return 1


def _calibrate(model: Path, num: int) -> None:
    from run.evaluate.command import progress
    from run.train.calibrate import calibrate

    with contextlib.ExitStack() as stack:
        found = calibrate(model, num, lambda total: stack.enter_context(progress(total, is_quiet=False)))
    before, after = (100 * found[name]["mean"] for name in ("error", "error_calibrated"))
    print(f"{found['accepted_length']:.2f} tokens a step; error of the confidence {before:.1f} %, now {after:.1f} %")


class _Ended(NamedTuple):
    """How training ended: `status` 1 where it was said why it cannot go on."""

    status: int
    was_stopped: bool = False


def _spawn(run: RunFolder, minutes: float, seed: int, processes: int, *, is_drafts: bool) -> _Ended:
    """Train in processes of their own. Raises SettingsError while another command trains in the folder."""
    from torch.multiprocessing.spawn import ProcessExitedException, spawn

    try:
        run.acquire()
        run.begin_log()
    except OSError as error:
        return _Ended(_refused(error))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # one ends with the other: no news
    signals, stops = (signal.SIGINT, signal.SIGTERM), list[int]()
    # The processes ignore SIGINT too, until they can save.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        started = spawn(_work, (processes, address, run, minutes * 60, seed, is_drafts), processes, join=False)
        for number in signals:
            signal.signal(number, lambda number, _: stops.append(number))
        while not started.join(timeout=_TELL_S):
            if stops:
                _stop(started.pids())  # again and again: one that is starting does not hear it yet
    except ProcessExitedException as error:
        if error.exit_code != _REFUSED:
            raise
        return _Ended(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        run.release()
    return _Ended(0, bool(stops))


def _stop(pids: Sequence[int]) -> None:
    """Have the processes save and end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


def _work(rank: int, world: int, address: str, run: RunFolder, seconds: float, seed: int, is_drafts: bool) -> None:
    """One of the processes that train together; the first one saves."""
    import torch
    from torch import distributed

    from run.evaluate.calibration import write_temperatures
    from run.train import layers
    from run.train.curriculum import DRAFTS, PLAN
    from run.train.drafts import DraftTrainer
    from run.train.parameters import write
    from run.train.trainer import Trainer

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    layers.fuse()
    try:
        trainer: Steps[Any] = DraftTrainer(run.model, DRAFTS, seed) if is_drafts else Trainer(run.model, PLAN, seed)
        state = run.load()
        if state is not None:
            trainer.load(state)
    except (OSError, ValueError) as error:  # a folder that is no checkpoint, a state that is none or another run's
        if rank == 0:
            print(f"shoal: {error}", file=sys.stderr)
        distributed.barrier()  # when one process ends, the others are ended: this one may not have spoken
        raise SystemExit(_REFUSED) from None
    try:
        if rank == 0:
            run.truncate_log(trainer.step)
        _run(trainer, run if rank == 0 else None, seconds)
        if rank == 0:
            run.save(trainer.state())
            write(run.model, {**trainer.frozen, **trainer.parameters}, trainer.config)
            write_temperatures(run.model, None)  # they were those of other drafts
            print(f"{trainer.step} of {trainer.plan.num_steps} steps; the model is in {run.model}")
    except OSError as error:  # a full disk, most likely
        print(f"shoal: {error}", file=sys.stderr)
        raise SystemExit(_REFUSED) from None
    distributed.destroy_process_group()


def _run(trainer: Steps[Any], run: RunFolder | None, seconds: float) -> None:
    """Steps until the time is over, Ctrl-C or the end of the plan; with `run` also the log, the state and the bar."""
    saved = time.monotonic()
    until, stops = saved + seconds, []
    signal.signal(signal.SIGINT, lambda *_: stops.append(True))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever started us tells us
    columns = (
        TextColumn("{task.fields[stage]}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[told]}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    reports: list[Any] = []
    with Progress(*columns, disable=run is None, speed_estimate_period=600) as bar:
        total = trainer.plan.num_steps
        line = bar.add_task("", total=total, completed=trainer.step, stage="", told="", speed=0.0)
        for report in trainer.run(lambda: bool(stops) or time.monotonic() > until):
            if run is None:
                continue
            reports.append(report)
            if len(reports) == _LOG_STEPS:
                run.log(reports)
                bar.update(line, **_figures(reports))
                reports = []
                if time.monotonic() - saved > _SAVE_S:  # here the log has all the steps of the state, and no others
                    run.save(trainer.state())
                    saved = time.monotonic()
            bar.update(line, completed=trainer.step)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # told again, it would not live to save
    if run is not None and reports:
        run.log(reports)


def _figures(reports: list[Any]) -> dict[str, Any]:
    from run.train.state import means

    took_s = sum(one.took_s for one in reports)
    return {
        "stage": reports[-1].stage,
        "told": " ".join(f"{name} {value:.3f}" for name, value in means(reports).items()),
        "speed": sum(one.num_tokens for one in reports) / took_s,
    }
