"""A table of checks against golden numbers: what was compared, how far apart it is, and whether that is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Check:
    """One comparison. `is_required` is False for what the golden data themselves call a smoke test."""

    name: str
    passed: bool
    detail: str
    is_required: bool = True


@dataclass
class Report:
    """Checks in order; nothing stops at the first that fails."""

    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, passed: bool, detail: str, *, is_required: bool = True) -> None:
        self.checks.append(Check(name, passed, detail, is_required))

    def close(self, name: str, got: torch.Tensor, want: torch.Tensor, atol: float, *, rtol: float = 0.0) -> None:
        """Every value within `atol` + `rtol` of the golden one."""
        got, want = got.float(), want.float()
        error = (got - want).abs()
        passed = got.shape == want.shape and bool((error <= atol + rtol * want.abs()).all())
        self.add(name, passed, f"max error {float(error.max()):.1e}, allowed {atol:g}" if error.numel() else "empty")

    def equal(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """The same values."""
        differs = int((got.long() != want.long()).sum()) if got.shape == want.shape else -1
        self.add(name, differs == 0, f"{differs} of {want.numel()} differ")

    def rms(self, name: str, got: torch.Tensor, want: torch.Tensor, share: float, num_loose_rows: int = 0) -> None:
        """Root mean square error per row at most `share` of that of the golden values, but for some rows."""
        got, want = got.float().flatten(1), want.float().flatten(1)
        error = (got - want).square().mean(1).sqrt() / want.square().mean().sqrt()
        loose = int((error > share).sum())
        passed = got.shape == want.shape and loose <= num_loose_rows
        self.add(name, passed, f"median {float(error.median()):.1e} of rms, {loose} rows beyond {share:g}")

    def caches(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """At least 99.5 % of the values the same."""
        same = float((got.float() == want.float()).float().mean()) if got.shape == want.shape else 0.0
        self.add(name, same >= 0.995, f"{100 * same:.2f} % the same")

    def picks(self, name: str, got: torch.Tensor, want: torch.Tensor, scores: torch.Tensor, tolerance: float) -> None:
        """Equal sets, or differing in rows whose golden score ties with the lowest one picked."""
        wrong = sum(not _ties(*row, tolerance) for row in zip(got.tolist(), want.tolist(), scores.float(), strict=True))
        self.add(name, wrong == 0, f"{wrong} of {len(want)} rows differ")

    def lines(self) -> Iterable[str]:
        """The table, failures marked."""
        width = max(len(check.name) for check in self.checks)
        for check in self.checks:
            mark = "ok  " if check.passed else "FAIL" if check.is_required else "note"
            yield f"{mark} {check.name:<{width}}  {check.detail}"

    @property
    def num_failed(self) -> int:
        return sum(check.is_required and not check.passed for check in self.checks)


def _ties(got: list[int], want: list[int], scores: torch.Tensor, tolerance: float) -> bool:
    ours, theirs = {pick for pick in got if pick >= 0}, {pick for pick in want if pick >= 0}
    if len(ours) != len(theirs):
        return False
    lowest = min((float(scores[pick]) for pick in theirs), default=0.0)
    return all(pick < len(scores) and abs(float(scores[pick]) - lowest) <= tolerance for pick in ours ^ theirs)
