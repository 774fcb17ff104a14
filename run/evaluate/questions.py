"""What is asked: examples of every task, and of recall so many for each tenth of the note that the fact may lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from run.settings import SettingsError
from run.train.example import Example
from run.train.seeds import Split, rng
from run.train.tasks import HELD_OUT, TASKS

RECALL = "recall"
RECALL_TOKENS = (1_000, 4_000)
"""Prompt lengths that recall is asked at, about."""
OTHER_TOKENS = 256
NUM_DEPTHS = 10
_APART = 1_000_000
"""Between the indices of one length and the next: the same index would make notes that begin alike."""


@dataclass(frozen=True, slots=True)
class Question:
    """An example, and the row of the table that it counts for; `part` of it, a tenth of recall's note, else 0."""

    row: str
    part: int
    example: Example


def tasks_of(names: str) -> list[str]:
    """The tasks of a list with commas between, all of them for an empty one. Raises SettingsError."""
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip())) or list(TASKS)
    if unknown := [name for name in chosen if name not in TASKS]:
        raise SettingsError(f"--tasks {names}: there is no {unknown[0]!r}; there are {', '.join(TASKS)}")
    return chosen


def sampled(tasks: Sequence[str], num: int, split: Split, first: int = 0) -> list[Question]:
    """`num` of each task, of recall of each length, from index `first` on."""
    found: list[Question] = []
    for task, num_tokens, start in _sources(tasks, first):
        found += islice(_questions(task, num_tokens, split, start), num)
    return found


def spread(tasks: Sequence[str], num: int, split: Split, first: int = 0) -> list[Question]:
    """The same, but of recall `num` for each tenth of the note, at each length."""
    found: list[Question] = []
    for task, num_tokens, start in _sources(tasks, first):
        asked = _questions(task, num_tokens, split, start)
        if task != RECALL:
            found += islice(asked, num)
            continue
        room = [num] * NUM_DEPTHS
        while any(room):
            question = next(asked)
            if room[question.part]:
                room[question.part] -= 1
                found.append(question)
    return found


def _sources(tasks: Sequence[str], first: int) -> Iterator[tuple[str, int, int]]:
    """Task, prompt tokens, index of the first example."""
    for task in tasks:
        for place, num_tokens in enumerate(RECALL_TOKENS if task == RECALL else (OTHER_TOKENS,)):
            yield task, num_tokens, first + place * _APART


def _questions(task: str, num_tokens: int, split: Split, start: int) -> Iterator[Question]:
    make = (HELD_OUT if split == "held-out" else TASKS)[task]
    for index in count(start):
        example = make(rng(split, task, index), num_tokens)
        if task != RECALL:
            yield Question(example.skill, 0, example)
        elif example.depth is not None:
            part = min(int(example.depth * NUM_DEPTHS), NUM_DEPTHS - 1)
            yield Question(f"{RECALL} {num_tokens:,}", part, example)
