"""The tasks that examples are made by, one module each.

A task is `example(rng, num_tokens) -> Example`: the same state of `rng` gives the same example, `num_tokens` is the
rough length wanted of the prompt (tasks of a fixed size ignore it), and all randomness comes from `rng`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from run.train.example import Example
from run.train.tasks import about, arithmetic, extraction, picture, recall, tools, transform

Task = Callable[[random.Random, int], Example]

TASKS: dict[str, Task] = {
    "recall": recall.example,
    "transform": transform.example,
    "arithmetic": arithmetic.example,
    "tools": tools.example,
    "extraction": extraction.example,
    "about": about.example,
    "picture": picture.example,
}
HELD_OUT: dict[str, Task] = TASKS | {"about": about.held_out}
"""What held-out examples are made by: the same, but for what is known by heart, which is asked in other words."""
