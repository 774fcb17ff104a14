"""The one table of failures: complete, and published as it is."""

from __future__ import annotations

from pathlib import Path

from schemas.failure import FAILURES, Code

README = Path(__file__).parents[2] / "schemas" / "README.md"


def test_every_code_has_a_row() -> None:
    assert set(FAILURES) == set(Code)


def test_the_table_in_the_readme_is_this_one() -> None:
    text = README.read_text()
    for code, row in FAILURES.items():
        retry = "yes" if row.is_retryable else "no"
        assert f"| `{code.value}` | {row.http_status} | {retry} | {row.what_to_do} |" in text
