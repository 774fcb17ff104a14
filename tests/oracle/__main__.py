"""`python -m tests.oracle FOLDER`: every golden file of a set of model folders against the kernels, as a table.

The suite runs on a part of the development set that lies beside it; this runs on a whole set of that layout, and on
sets that the suite has never seen.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.oracle.backbone import check_backbone
from tests.oracle.parts import check_parts
from tests.oracle.report import Report
from tests.oracle.vision import check_vision


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    report = Report()
    for model in sorted(path.parent for path in folder.glob("*/config.json")):
        for dtype in ("fp32", "bf16"):
            print(f"{model.name} {dtype}", file=sys.stderr)
            if (model / "vision.safetensors").exists():
                check_vision(report, model, dtype)
            if not (model / "logits_fp32.safetensors").exists():
                continue
            check_parts(report, model, dtype)
            check_backbone(report, model, dtype)
    for line in report.lines():
        print(line)
    print(f"{len(report.checks)} checks, {report.num_failed} failed")
    return 1 if report.num_failed or not report.checks else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.oracle FOLDER")
    sys.exit(main(Path(sys.argv[1])))
