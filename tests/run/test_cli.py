"""The command line: help everywhere, and mistakes answered in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.edge import make_card

COMMANDS = ["", "up", "node", "health", "status", "chat", "eval", "checkpoint", "checkpoint make"]
SIMULATIONS = ["simulate", "simulate experts"]
BENCHES = ["bench", *(f"bench {name}" for name in ("bus", "frontend", "engine", "kv", "cost", "turns", "stream"))]


def shoal(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    return subprocess.run(
        [sys.executable, "-m", "run.cli", *arguments],
        env={**clean, "SHOAL_HOME": str(folder / "home"), "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("command", [*COMMANDS, *SIMULATIONS, *BENCHES])
def test_every_command_has_help(command: str, tmp_path: Path) -> None:
    done = shoal(*command.split(), "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Usage: shoal {command}".strip() in done.stdout
    first = done.stdout.splitlines()[2].strip()
    assert first and not first.startswith("╭"), "it does not say what it does"


@pytest.mark.parametrize(
    ("arguments", "environment", "error"),
    [
        (["up"], {"SHOAL_HTTP_PORT": "http"}, "shoal: SHOAL_HTTP_PORT=http: not a port"),
        (["up"], {"SHOAL_MODEL": "deepseek-ai/DeepSeek-V4.1-Flash"}, "hf download deepseek-ai/DeepSeek-V4.1-Flash"),
        (["up", "--cluster", "none.toml"], {}, "shoal: none.toml: not found"),
        (["node"], {}, "shoal: no actors given"),
        (["node", "decode/d0"], {}, "shoal: SHOAL_NATS_URL is not set"),
        (["node", "chef/c0"], {}, "there is no role 'chef'"),
        (["status"], {}, "shoal: no stack runs from {folder}/home (SHOAL_HOME) and SHOAL_NATS_URL is not set"),
        (["status"], {"SHOAL_HOME": "/dev/null"}, "shoal: no stack runs from /dev/null (SHOAL_HOME)"),
        (["health", "decode/d0"], {}, "shoal: SHOAL_NATS_URL is not set; start one with `shoal up`"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], environment: dict[str, str], error: str, tmp_path: Path) -> None:
    done = shoal(*arguments, folder=tmp_path, **environment)
    assert done.returncode == 2
    assert error.format(folder=tmp_path) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_vision_node_of_a_text_only_checkpoint_has_nothing_to_do(tmp_path: Path) -> None:
    make_card(tmp_path / "model")
    done = shoal("node", "vision/-", folder=tmp_path, SHOAL_MODEL=str(tmp_path / "model"))
    assert done.returncode == 0
    assert "no vision tower: nothing to do for vision/-" in done.stderr


def test_a_broker_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = shoal("status", folder=tmp_path, SHOAL_NATS_URL="nats://internal:secret@127.0.0.1:9")
    assert done.returncode == 1
    assert "cannot connect to NATS at 127.0.0.1:9" in done.stderr and "secret" not in done.stderr


def test_a_chat_without_a_gateway_says_what_to_do(tmp_path: Path) -> None:
    done = shoal("chat", folder=tmp_path, SHOAL_HTTP_PORT="9")
    assert done.returncode == 1
    assert "start one with `shoal up`" in " ".join(done.stdout.split())
