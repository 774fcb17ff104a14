"""What replicas say in their load reports for balancers to read: the numbers of `LoadReported.detail` by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from actors.rules.cost import PUBLISHED, Cost

_REMAINING = "remaining_ns:"
_COST = "cost_"


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
        """For a load report."""
        remaining = {f"{_REMAINING}{tenant}": ns for tenant, ns in self.remaining_ns.items() if ns}
        return remaining | {f"{_COST}{name}": ns for name, ns in asdict(self.cost).items()}

    @classmethod
    def of(cls, detail: Mapping[str, float]) -> PrefillLoad:
        """What a report says; one that says nothing of costs has the published ones."""
        remaining = {
            name.removeprefix(_REMAINING): ns for name, ns in detail.items() if name.startswith(_REMAINING)
        }
        known = {one.name: detail[_COST + one.name] for one in fields(Cost) if _COST + one.name in detail}
        return cls(remaining, Cost(**known) if known else PUBLISHED)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Tokens a decode replica has promised room for, prompts and whole outputs, and how long outputs usually are."""

    reserved_tokens: float = 0.0
    mean_output: float = 0.0

    def detail(self) -> dict[str, float]:
        """For a load report."""
        return asdict(self)

    @classmethod
    def of(cls, detail: Mapping[str, float]) -> DecodeLoad:
        """What a report says."""
        return cls(**{one.name: detail[one.name] for one in fields(cls) if one.name in detail})


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
        return cls(detail.get("num_patches", 0.0))
