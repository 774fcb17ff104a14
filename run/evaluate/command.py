"""`shoal eval`: skills, through the API of the system that runs; drafts and replay of a checkpoint, in this process."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from run.client import GatewayClient, GatewayError
from run.evaluate.asking import Asker
from run.evaluate.questions import RECALL, Question, sampled, spread, tasks_of
from run.evaluate.report import rows, same_rows, same_table, skills_table
from run.settings import Settings, SettingsError
from run.status import PIPE_COLUMNS
from run.train.seeds import Split

if TYPE_CHECKING:
    from kernels.model import Model
    from run.evaluate.decoding import Prompt

NUM_ASKED = 50
NUM_COMPUTED = 20
MAX_TOKENS = 512
AT_ONCE = 4

app = App(name="eval")


@app.default
def skills(
    *,
    tasks: str = "",
    num: int = NUM_ASKED,
    split: Split = "held-out",
    first: int = 0,
    exact: bool = False,
    at_once: int = AT_ONCE,
    max_tokens: int = MAX_TOKENS,
    url: str = "",
    key: str = "",
    json: bool = False,
) -> int:
    """Ask the system that runs what a model can do, on examples it has not seen, and count right answers.

    Each row has its share with an interval of 95 %, times as a client sees them, and what should not be: answers that
    did not end, control sequences in them, requests that failed. Status 1 if any failed.

    Parameters
    ----------
    tasks
        Which, with commas between; all by default.
    num
        Questions of each task; of recall for each tenth of the note, at each of its two lengths.
    split
        held-out, or train: what the model may have seen.
    first
        Index of the first example. What was asked before is cached, so other ones show times of cold prompts.
    exact
        Ask recall a second time, without bounded replay and cache, and compare the answers.
    at_once
        Requests at a time. One gives the times of an idle system.
    max_tokens
        The longest answer.
    url
        Where the gateway is; by default that of the stack that runs from SHOAL_HOME, else port SHOAL_HTTP_PORT here.
    key
        An API key, if the gateway asks for one.
    json
        Print one JSON object instead of tables.
    """
    _check(num, max_tokens, at_once)
    if first < 0:
        raise SettingsError(f"--first {first}: must not be negative")
    chosen = tasks_of(tasks)
    client = GatewayClient(Settings.from_environment(), url, key)
    try:
        model = client.first_model()
    except GatewayError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    asked = spread(chosen, num, split, first)
    recalled = [question for question in asked if question.row.startswith(RECALL)] if exact else []
    asker = Asker(client, model, max_tokens)
    with progress(len(asked) + len(recalled), is_quiet=json) as told:
        answers = asker.ask_all(asked, at_once, told)
        again = asker.ask_all(recalled, at_once, told, exact=True)
    found = rows(answers)
    same = same_rows([answer for answer in answers if answer.question.row.startswith(RECALL)], again) if exact else []
    if json:
        print(json_module.dumps({"model": model, "split": split, "skills": found, "exact": same}))
    else:
        console = _console()
        console.print(skills_table(found, f"{model}, {split}"))
        if exact:
            console.print(same_table(same))
    failures = dict.fromkeys(answer.failure for answer in [*answers, *again] if answer.failure)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


@app.command
def drafts(
    folder: Path | None = None,
    /,
    *,
    tasks: str = "",
    num: int = NUM_COMPUTED,
    split: Split = "held-out",
    max_tokens: int = MAX_TOKENS,
    json: bool = False,
) -> int:
    """How many drafts are right, place by place, and whether their confidence says so, for greedy answers.

    Parameters
    ----------
    folder
        A checkpoint; SHOAL_MODEL, else the bundled one, by default.
    tasks
        Which, with commas between; all by default.
    num
        Prompts of each task; of recall at each of its two lengths.
    split
        held-out, or train.
    max_tokens
        The longest answer.
    json
        Print one JSON object instead of tables.
    """
    from run.evaluate.calibration import temperatures_of
    from run.evaluate.drafts import run_drafts
    from run.evaluate.drafts_report import drafts_table, summaries

    _check(num, max_tokens)
    place = folder or Settings.from_environment().model
    model, prompts = _open(place, sampled(tasks_of(tasks), num, split))
    if model.drafter is None:
        print(f"shoal: {place} has no draft stages", file=sys.stderr)
        return 1
    temperatures = temperatures_of(place, model.config.dspark_block_size)
    with progress(len(prompts), is_quiet=json) as told:
        steps = run_drafts(model, prompts, max_tokens, told)
    found = summaries(steps, temperatures)
    if json:
        print(json_module.dumps({"model": place.name, "split": split, "drafts": found}))
    else:
        _console().print(drafts_table(found, f"drafts of {place.name}, {split}"))
    return 0


@app.command
def replay(
    folder: Path | None = None,
    /,
    *,
    num: int = NUM_COMPUTED,
    split: Split = "held-out",
    max_tokens: int = MAX_TOKENS,
    json: bool = False,
) -> int:
    """How far bounded replay is from the exact prompt, on recall: same greedy answers, and KL divergence per token.

    Parameters
    ----------
    folder
        A checkpoint; SHOAL_MODEL, else the bundled one, by default.
    num
        Prompts at each of the two lengths.
    split
        held-out, or train.
    max_tokens
        The longest answer.
    json
        Print one JSON object instead of a table.
    """
    from run.evaluate.replay import compare, replay_table, summaries

    _check(num, max_tokens)
    place = folder or Settings.from_environment().model
    model, prompts = _open(place, sampled([RECALL], num, split))
    with progress(len(prompts), is_quiet=json) as told:
        found = compare(model, prompts, max_tokens, told)
    said = summaries(found)
    if json:
        print(json_module.dumps({"model": place.name, "split": split, "replay": said}))
    else:
        _console().print(replay_table(said, f"bounded replay of {place.name} against exact prompts, {split}"))
    return 0


def _check(num: int, max_tokens: int, at_once: int = 1) -> None:
    if min(num, max_tokens, at_once) < 1:
        raise SettingsError("numbers of prompts, tokens and requests at once must be positive")


def _open(place: Path, questions: list[Question]) -> tuple[Model, list[Prompt]]:
    """The model of a checkpoint folder, and questions as prompts for it. Raises SettingsError where it is none."""
    from run.evaluate.decoding import open_model
    from run.evaluate.prompts import render

    try:
        return open_model(place), render(place, questions)
    except (OSError, ValueError) as error:  # of config.json, shoal.json, the tokenizer or the weights
        raise SettingsError(str(error)) from None


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)


@contextmanager
def progress(num: int, *, is_quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar of `num` steps with the time left, on standard error; what it gives is called after each."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_quiet) as bar:
        task = bar.add_task("", total=num)
        yield lambda: bar.advance(task)
