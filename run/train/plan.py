"""What is trained on when: stages of steps, each with the shapes of its rows and the shares of its tasks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from run.train.packing import ALIGN
from run.train.rendering import Sample

Make = Callable[[str, int, int], Sample]
"""A sample of a task: (task, number, rough number of tokens)."""


_SHORT = 256


class Rows(NamedTuple):
    """`num` rows of `columns`; the decoder computes the last `region`.

    A row holds as many conversations as there is room for. In one longer than _SHORT the last is a long note to recall
    from; where the decoder sees less than all it is the only one.
    """

    num: int
    columns: int
    region: int


class Stage(NamedTuple):
    """`num_steps` of batches: their `rows` with the share of each, the shares of `tasks`, the first and the last rate
    as parts of the full one.

    `longest`: tokens of a prompt, but for long notes; `guide`: the weight of the loss of guided heads; `select`:
    queries see only what indexers pick; `rounded`: products read FP8.
    """

    name: str
    num_steps: int
    rows: Mapping[Rows, float]
    tasks: Mapping[str, float]
    rates: tuple[float, float]
    longest: int = 230
    guide: float = 0.0
    select: bool = False
    rounded: bool = False


class Plan(NamedTuple):
    """Stages, one after the other."""

    stages: tuple[Stage, ...]

    @property
    def num_steps(self) -> int:
        return sum(stage.num_steps for stage in self.stages)

    @property
    def shares(self) -> list[int]:
        """How many processes can train by it: what divides the rows of each of its batches."""
        rows = math.gcd(*(rows.num for stage in self.stages for rows in stage.rows))
        return [num for num in range(1, rows + 1) if rows % num == 0]

    def at(self, step: int) -> tuple[Stage, float]:
        """The stage of a step, and the rate at it. Raises ValueError behind the last step."""
        for stage in self.stages:
            if step < stage.num_steps:
                first, last = stage.rates
                return stage, first + (last - first) * step / stage.num_steps
            step -= stage.num_steps
        raise ValueError(f"the plan ends after {self.num_steps} steps")


def fill(stage: Stage, draw: random.Random, number: int, make: Make) -> tuple[Rows, list[list[Sample]]]:
    """The samples of a step: those of each row. `number`: from it on samples are counted, a million a step."""
    rows = draw.choices(list(stage.rows), list(stage.rows.values()))[0]
    found: list[list[Sample]] = []
    for _ in range(rows.num):
        row, room, misses = [], rows.columns, 0
        while room > 64 and misses < 3:
            number += 1
            sample = _draw(stage, rows, draw, number, room, make)
            size = -(-len(sample.tokens) // ALIGN) * ALIGN
            if size > room:
                misses += 1
                continue
            row.append(sample)
            room -= size
            if rows.region < rows.columns:
                break
        found.append(row[::-1])
    return rows, found


def _draw(stage: Stage, rows: Rows, draw: random.Random, number: int, room: int, make: Make) -> Sample:
    if rows.columns > _SHORT and room == rows.columns:
        return make("recall", number, int(rows.columns * draw.uniform(0.6, 0.94)))
    task = draw.choices(list(stage.tasks), list(stage.tasks.values()))[0]
    return make(task, number, int(draw.uniform(0.3, 1.0) * min(0.9 * room, stage.longest)))
