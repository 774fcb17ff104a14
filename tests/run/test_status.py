"""`shoal status`: what it makes of load reports."""

from __future__ import annotations

import json

import pytest

from run import status
from run.settings import Settings
from schemas.message import Role
from schemas.routing import LoadReported


def report(role: Role, id: str, **detail: float) -> LoadReported:
    return LoadReported(role=role, id=id, incarnation="i", seq=1, pid=7, host="h", detail=detail)


REPORTS = [
    report(Role.ENTRYPOINT, "e0", prompt_tokens=1_000_000, cached_tokens=700_000),
    report(Role.ENTRYPOINT, "e1", prompt_tokens=234_567, cached_tokens=65_432),
    report(Role.KVSTORE, "k0", blocks=1234, bytes=1023, stored_bytes=1 << 20, budget_bytes=1.5 * 2**30),
]


def told(monkeypatch: pytest.MonkeyPatch, reports: list[LoadReported], *, as_json: bool = False) -> int:
    async def collect(nats_url: str) -> list[LoadReported]:
        return reports

    monkeypatch.setattr(status, "_collect", collect)
    settings = Settings.from_environment({"SHOAL_NATS_URL": "nats://127.0.0.1:9", "SHOAL_HOME": "/dev/null"})
    return status.print_status(settings, as_json=as_json)


def test_bytes_are_readable_and_what_was_cached_is_summed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, REPORTS) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert last == "62 % of 1,234,567 prompt tokens were cached"
    row = next(line for line in table if line.startswith("kvstore/k0"))
    assert row.split()[-4:] == ["blocks=1,234", "bytes=1023B", "stored_bytes=1MiB", "budget_bytes=1.5GiB"]


def test_times_are_seconds_and_coefficients_are_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"remaining_ns:acme": 2.5e9, "cost_token_ns": 55_000.0, "cost_pair_ns": 13.0, "cost_residual": 0.0312}
    assert told(monkeypatch, [report(Role.PREFILL, "p0", **said)]) == 0
    row = capsys.readouterr().out.strip().splitlines()[-1]
    assert row.split()[-3:] == ["remaining_s:acme=2.5", "token_us=55", "cost_off=3.1%"]


def test_json_is_exact(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(monkeypatch, REPORTS, as_json=True) == 0
    actors = json.loads(capsys.readouterr().out)["actors"]
    assert [actor["detail"] for actor in actors] == [report.detail for report in REPORTS]


def test_before_the_first_request_nothing_is_said_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, [report(Role.ENTRYPOINT, "e0", prompt_tokens=0, cached_tokens=0)]) == 0
    assert "were cached" not in capsys.readouterr().out


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(monkeypatch, []) == 1
    assert "nobody answered" in capsys.readouterr().err
