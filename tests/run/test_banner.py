"""What `shoal up` says: its commands work from where it was started, and no key is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from run.banner import banner
from run.settings import Settings

NATS = "nats://127.0.0.1:4222"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `shoal` in a virtual environment in the current folder, which is not on the PATH. It prints its SHOAL_HOME."""
    script = tmp_path / "here" / ".venv" / "bin" / "shoal"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/sh\necho "$SHOAL_HOME" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path / "here")
    return script


def lines(*, has_keys: bool = False, stores_blocks: bool = True, **environment: str) -> list[str]:
    settings = Settings.from_environment(environment)
    return banner(settings, ["shoal-tiny"], NATS, has_keys=has_keys, stores_blocks=stores_blocks)


def command(said: list[str], word: str) -> str:
    return next(line.strip() for line in said if f" {word}" in line)


def run(line: str, **environment: str) -> str:
    done = subprocess.run(["/bin/sh", "-c", line], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_command_of_this_installation_is_shown_from_the_current_folder(installed: Path) -> None:
    assert command(lines(), "status") == ".venv/bin/shoal status"
    assert run(command(lines(), "chat")) == "chat"


@pytest.mark.parametrize("is_ours", [True, False])
def test_on_the_path_its_name_is_enough_if_it_is_this_one(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    folder = installed.parent if is_ours else tmp_path / "bin"
    if not is_ours:
        folder.mkdir()
        (folder / "shoal").write_text("#!/bin/sh\n")
        (folder / "shoal").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin")
    assert command(lines(), "status") == ("shoal status" if is_ours else ".venv/bin/shoal status")


@pytest.mark.parametrize("place", ["other home", "here/second"])
def test_another_home_comes_with_the_commands(installed: Path, tmp_path: Path, place: str) -> None:
    home = tmp_path / place
    said = lines(SHOAL_HOME=str(home))
    told, word = run(command(said, "status")).rsplit(" ", 1)
    assert word == "status" and Path(told).absolute() == home
    assert f"  logs           {home}/logs" in said


def test_without_a_script_it_is_python_that_is_shown(installed: Path) -> None:
    installed.unlink()
    assert command(lines(), "status") == ".venv/bin/python -m run.cli status"


def test_with_keys_commands_take_one_and_the_open_port_is_said(installed: Path) -> None:
    said = lines(has_keys=True, SHOAL_API_KEYS="sk-secret=acme", SHOAL_HTTP_PORT="8300")
    assert any("port 8300 is open on all interfaces" in line for line in said)
    assert "sk-secret" not in "\n".join(said)
    assert run(command(said, "chat"), KEY="sk-mine") == "chat --key sk-mine"
    curl = run("printf '%s\\n' " + command(said, "-H"), KEY="sk-mine").splitlines()
    assert "authorization: Bearer sk-mine" in curl and curl[1] == "http://127.0.0.1:8300/v1/chat/completions"
    without = "\n".join(lines())
    assert "KEY" not in without and "interfaces" not in without


def test_the_store_is_said_where_there_is_one(installed: Path) -> None:
    assert any("KV cache" in line and "at most 64 MiB" in line for line in lines(SHOAL_STORE_MB="64"))
    assert not any("KV cache" in line for line in lines(stores_blocks=False))
