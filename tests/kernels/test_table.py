"""The table of golden checks passes on the part of the set that is here, and can fail."""

from __future__ import annotations

import pytest
import torch

from kernels.draft import Drafter
from kernels.model import Model
from tests.kernels.conftest import golden
from tests.oracle.parts import check_drafts
from tests.oracle.report import Report


@pytest.mark.oracle
def test_drafts_pass_and_a_wrong_tap_fails(mini: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {name: value for name, value in golden("mini/dspark_fp32").items() if name.startswith("p02")}
    report = Report()
    check_drafts(report, mini, data, "drafts", "fp32")
    assert report.num_failed == 0 and len(report.checks) == 4, list(report.lines())
    observe = Drafter.observe

    def shifted(self: Drafter, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return observe(self, taps.roll(1, 1), positions)

    monkeypatch.setattr(Drafter, "observe", shifted)
    report = Report()
    check_drafts(report, mini, data, "drafts", "fp32")
    assert report.num_failed == 4


def test_every_kind_of_check_can_fail() -> None:
    report = Report()
    value, other = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 1
    picks, swapped, scores = torch.tensor([[0, 2]]), torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.7, 0.9]])
    for got in (value, other):
        report.close("close", got, value, 0.1)
        report.equal("equal", got, value)
        report.rms("rms", got, value, 0.01)
        report.caches("caches", got, value)
    report.picks("picks", picks, picks, scores, 0.1)
    report.picks("picks", swapped, picks, scores, 0.1)
    assert [check.passed for check in report.checks] == [True] * 4 + [False] * 4 + [True, False]
    assert report.num_failed == 5 and "FAIL" in "\n".join(report.lines())
