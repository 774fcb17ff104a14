"""The table of reliability cases names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_case_has_a_verdict_and_every_test_named_exists() -> None:
    rows = [line.split("|") for line in (TESTS / "CASES.md").read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(row[1]) for row in rows] == list(range(1, 45))
    for _, number, _, tests, verdict, _ in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named and "`" not in re.sub(r"`[\w/]+\.py::\w+`", "", tests), number
        assert re.search("held|open|cannot occur", verdict), number
        for path, name in named:
            assert f"def {name}(" in (TESTS / path).read_text(), f"{number}: {path}::{name}"
