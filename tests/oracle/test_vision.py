"""The golden images and the prompts with them pass, and each stage that goes wrong shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.ops.experts import route
from kernels.vision import VisionEncoder
from kernels.vocabulary import TokenMap
from tests.kernels.conftest import GOLDEN
from tests.oracle.backbone import Dtype
from tests.oracle.report import Report
from tests.oracle.vision import check_vision


def check(dtype: Dtype) -> Report:
    torch.set_num_threads(1)
    report = Report()
    check_vision(report, GOLDEN / "mini-vision", dtype)
    return report


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "num_checks"), [("fp32", 33), ("bf16", 25)])
def test_golden_images(dtype: Dtype, num_checks: int) -> None:
    report = check(dtype)
    assert report.num_failed == 0 and len(report.checks) == num_checks, list(report.lines())


def _turned_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    align = VisionEncoder.align
    monkeypatch.setattr(VisionEncoder, "align", lambda self, x, rows, columns: align(self, x.flip(0), rows, columns))


def _routed_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.moe.route", lambda logits, bias, *rest: route(logits, bias.view(-1, 5)[0], *rest))


def _alive_to_engram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenMap, "_replace", lambda self, **changes: self)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("break_it", "shows"),
    [(_turned_cells, {"rows"}), (_routed_as_text, {"logits", "tokens"}), (_alive_to_engram, {"rows", "logits"})],
)
def test_what_is_wrong_fails(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], shows: set[str]
) -> None:
    break_it(monkeypatch)
    failed = {check.name.split()[-1] for check in check("fp32").checks if not check.passed}
    assert shows <= failed
