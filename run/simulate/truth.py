"""How long steps really take in the simulation. Policies never see this: they see what replicas measure and report.

Not the formula that costs are fitted with (actors/rules/cost.py): a step computes whole tiles, a small one takes as
long as reading the weights does, each has some noise, now and then one is held up, and no two replicas are equally
fast.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

TILE = 64
"""Rows of a matrix product are computed in tiles."""


class Piece(NamedTuple):
    """Of one prompt in one step: so many tokens behind `num_done`, to its end or not."""

    num_tokens: int
    num_done: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Truth:
    """Nanoseconds of the hardware. The defaults add up to what is published of the real model on eight H100 (spec
    serving.md §3, K4: 36.7 ms a request, 50.5 µs a token, 0.134 ns a pair), with that of a request shared out between
    the step and what only a prompt's end has; decode steps as is usual for 20 to 50 tokens a second."""

    step_ns: float = 10e6
    end_ns: float = 26.7e6
    token_ns: float = 50.5e3
    pair_ns: float = 0.134
    floor_tokens: int = 128
    decode_step_ns: float = 20e6
    decode_row_ns: float = 0.1e6
    noise: float = 0.03
    hitch_chance: float = 0.002
    hitch: float = 4.0

    def prefill_ns(self, pieces: Iterable[Piece]) -> float:
        """One step on a replica of speed 1, without noise."""
        rows, pairs, ends = 0, 0.0, 0
        for num_tokens, num_done, is_last in pieces:
            rows += -(-num_tokens // TILE) * TILE
            pairs += num_tokens * (num_done + num_tokens / 2)
            ends += is_last
        return (
            self.step_ns + self.token_ns * max(rows, self.floor_tokens) + self.pair_ns * pairs + self.end_ns * ends
        )

    def decode_ns(self, num_rows: int) -> float:
        """One step of so many requests."""
        return self.decode_step_ns + self.decode_row_ns * num_rows

    def alone_s(self, num_prompt: int, num_done: int) -> float:
        """From a prompt's arrival to its first token in an empty system of speed 1; `num_done` tokens are cached."""
        prefill_ns = self.prefill_ns([Piece(num_prompt - num_done, num_done, True)])
        return (prefill_ns + self.decode_ns(1)) / 1e9

    def disturbed(self, chance: random.Random) -> float:
        """By how much a step is longer than it should be."""
        factor = max(0.5, chance.gauss(1.0, self.noise))
        return factor * self.hitch if chance.random() < self.hitch_chance else factor
