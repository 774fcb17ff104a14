"""What `shoal up` says when it gives up, and when it does not."""

from __future__ import annotations

import asyncio
import io
import socket
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


def test_a_port_that_somebody_took_before_the_broker_did(tmp_path: Path) -> None:
    """Then another one is tried. Two that start at the same moment find the same port free."""
    settings = replace(Settings.from_environment({}), home=tmp_path)
    said, specs = io.StringIO(), read_cluster(DEFAULT_CLUSTER)
    stack = up.Stack(specs, settings, Home(tmp_path), Console(file=said), tmp_path / "ready.json", DEFAULT_CLUSTER)
    config = stack._broker
    assert config is not None
    with socket.create_server((config.host, config.port)), pytest.raises(up.PortTaken):
        asyncio.run(stack.run())
    assert "gave up" not in said.getvalue()
    config.path.write_text("listen: [")
    assert asyncio.run(stack.run()) == 1 and "broker did not start" in said.getvalue()  # of another trouble it is said


def test_up_begins_again_with_another_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = list[up.Stack]()

    async def run(self: up.Stack) -> int:
        stacks.append(self)
        if len(stacks) < 3:
            raise up.PortTaken
        return 0

    monkeypatch.setattr(up.Stack, "run", run)
    settings = replace(Settings.from_environment({}), home=tmp_path, store=tmp_path / "kv", http_port=0)
    assert up.up(read_cluster(DEFAULT_CLUSTER), settings, Console(file=io.StringIO()), None) == 0
    assert len(set(stacks)) == 3
