"""What a simulation is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

POLICIES = ("quota", "requests", "round-robin", "tokens", "affinity")
"""Nanoseconds of work left; requests left; each in turn; tokens left; the longest cached prefix against the load."""

Progress = Callable[[str, float], None]
"""Told the policy that is at work, and which part of its requests is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to simulate. `load` is the part of the prefill replicas' time that the requests would keep busy if they were
    spread evenly: their times are stretched or shrunk to get there. None leaves the times alone. `overlap_weight` is
    what a cached block counts against load, for "affinity"."""

    policies: tuple[str, ...]
    num_prefill: int = 16
    num_decode: int = 16
    load: float | None = 0.8
    seed: int = 0
    overlap_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. `unloaded_s` is its time to first token on an idle replica of nominal speed, with the
    same prefix cached; `tpot_s` is None for an answer of one token. Times of a failed one mean nothing."""

    arrival_s: float
    ttft_s: float
    unloaded_s: float
    tpot_s: float | None
    num_cached: int
    num_prompt: int
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One policy's run: outcomes in order of arrival; seconds each replica was busy; how long it all took, in simulated
    seconds and in real ones."""

    outcomes: list[Outcome]
    prefill_busy_s: list[float]
    decode_busy_s: list[float]
    virtual_s: float
    wall_s: float
