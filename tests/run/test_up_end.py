"""What `shoal up` says when it gives up."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from run import up
from run.cluster import DEFAULT_CLUSTER, read_cluster
from run.home import Home
from run.settings import Settings
from supervisors.strategy import GaveUp
from supervisors.tasks import Ready, Stuck, Supervisor


def test_who_is_slow_to_stop_does_not_hide_why_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(Settings.from_environment({}), home=tmp_path, nats_url="nats://127.0.0.1:1")

    async def run(self: Supervisor, ready: Ready) -> None:
        try:
            raise GaveUp("prefill", "was not ready within 120 s")
        finally:
            raise Stuck("shoal: decode still runs 2.5 s after it was cancelled")

    monkeypatch.setattr(up.Supervisor, "run", run)
    said = io.StringIO()
    specs = read_cluster(DEFAULT_CLUSTER)
    stack = up.Stack(specs, settings, Home(tmp_path), Console(file=said), tmp_path / "ready.json", DEFAULT_CLUSTER)
    assert asyncio.run(stack.run()) == 1
    assert "prefill was not ready within 120 s" in said.getvalue() and "Stuck" not in said.getvalue()
