"""What replicas say in their load reports for balancers to read: the numbers of `LoadReported.detail` by name.

A number that cannot be one of its kind is taken for not said: one replica's nonsense is not to end all balancers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from actors.rules.cost import PUBLISHED, Cost
from kernels.engine import BLOCK_TOKENS

_REMAINING = "remaining_ns:"
_COST = "cost_"

_MOST = 1e15
"""Nanoseconds, tokens, patches: twelve days of work."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Nanoseconds of work left in a prefill replica, by tenant, and what work costs there."""

    remaining_ns: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = PUBLISHED

    @property
    def total_ns(self) -> float:
        """Of all tenants."""
        return sum(self.remaining_ns.values())

    def detail(self) -> dict[str, float]:
        """For a load report; of all tenants, too, for metrics."""
        remaining = {f"{_REMAINING}{tenant}": ns for tenant, ns in self.remaining_ns.items() if ns}
        cost = {f"{_COST}{name}": ns for name, ns in asdict(self.cost).items()}
        return {"remaining_ns": self.total_ns, **remaining, **cost}

    @classmethod
    def of(cls, detail: Mapping[str, float]) -> PrefillLoad:
        """What a report says; one that does not say all of costs has the published ones."""
        said = _sound(detail)
        remaining = {name.removeprefix(_REMAINING): ns for name, ns in said.items() if name.startswith(_REMAINING)}
        names = [one.name for one in fields(Cost)]
        is_whole = all(_COST + name in said for name in names)
        return cls(remaining, Cost(*(said[_COST + name] for name in names)) if is_whole else PUBLISHED)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Of a decode replica: tokens it counts room for, prompts and what outputs are expected to be (`promised_room`);
    how long outputs usually are there, 0 when it does not know; the longest prompt plus output it
    takes, 0 for any; and how many tokens it expects to hold when all that it has now are at their end.
    """

    reserved_tokens: float = 0.0
    mean_output: float = 0.0
    max_tokens: float = 0.0
    expected_tokens: float = 0.0

    def detail(self) -> dict[str, float]:
        """For a load report."""
        return asdict(self)

    @classmethod
    def of(cls, detail: Mapping[str, float]) -> DecodeLoad:
        """What a report says."""
        said = _sound(detail)
        return cls(**{one.name: said[one.name] for one in fields(cls) if one.name in said})


PRIOR_OUTPUT = 256.0
"""Tokens of an output, where nobody knows how long outputs usually are."""


def expected_output(mean_output: float, num_left: int) -> float:
    """Tokens still to come of an output that may have `num_left` more. It does not matter how many there are already:
    lengths are taken to be without memory, as those of a geometric distribution are.
    """
    return min(mean_output or PRIOR_OUTPUT, num_left)


STEP_TOKENS = 8
"""Room for the next step of a request: the token that is fed, and drafts behind it."""


def promised_room(
    num_tokens: int, num_left: int, mean_output: float, *, is_whole: bool = False, num_reserved: int = 0
) -> int:
    """Tokens of room, in whole blocks, that decode counts for a request of `num_tokens` which may have `num_left` more,
    when it asks itself whether another one may come.

    As far as its output is expected to go, but for a block behind what is reserved for it at least: so none comes that
    takes the room of the others' next steps. `is_whole`: all of it is reserved from the start.
    """
    whole = promised_tokens(num_tokens + num_left)
    if is_whole:
        return whole
    expected = promised_tokens(num_tokens + math.ceil(expected_output(mean_output, num_left)))
    reserved = max(promised_tokens(num_reserved), promised_tokens(num_tokens + STEP_TOKENS))
    return min(max(expected, reserved + BLOCK_TOKENS), whole)


def promised_tokens(num_tokens: int, max_tokens: float = 0.0) -> int:
    """Tokens of room that an engine sets aside for so many: whole blocks. `max_tokens` is the
    engine's longest request, 0 for any."""
    longest = min(num_tokens, int(max_tokens)) if max_tokens else num_tokens
    return -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class VisionLoad:
    """Patches of the images a vision replica has still to encode."""

    num_patches: float = 0.0

    def detail(self) -> dict[str, float]:
        """For a load report."""
        return asdict(self)

    @classmethod
    def of(cls, detail: Mapping[str, float]) -> VisionLoad:
        """What a report says."""
        return cls(_sound(detail).get("num_patches", 0.0))


def _sound(detail: Mapping[str, float]) -> dict[str, float]:
    """Without what is negative, beyond all measure, or no number at all."""
    return {name: number for name, number in detail.items() if 0 <= number <= _MOST}
