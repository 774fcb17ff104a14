"""What `shoal up` promises to scripts, and the commands that look at a running system."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from run.cluster import COMPUTING
from run.home import Home
from run.settings import DEFAULT_MODEL
from tests.stack.conftest import SERVING, System

pytestmark = pytest.mark.stack


def command(system: System, *arguments: str, home: str = "") -> list[str]:
    folder = home or str(system.folder / "home")
    return ["env", f"SHOAL_HOME={folder}", sys.executable, "-m", "run.cli", *arguments]


def shoal(system: System, *arguments: str, home: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(system, *arguments, home=home), capture_output=True, text=True, timeout=50, check=False
    )


def test_the_ready_file_is_private_and_complete(stack: System) -> None:
    assert stat.S_IMODE(stack.ready_file.stat().st_mode) == 0o600
    content = json.loads(stack.ready_file.read_bytes())
    assert set(content) == {"http", "nats", "client", "models", "pids"}
    assert set(content["client"]) == {"user", "password", "inbox_prefix"}
    assert content["models"] == ["shoal-tiny"]
    assert set(content["pids"]) == {*SERVING, "broker"}
    assert all(Path(f"/proc/{pid}").exists() for pids in content["pids"].values() for pid in pids)
    assert content["http"].startswith("http://127.0.0.1:") and content["nats"].startswith("nats://127.0.0.1:")
    assert stat.S_IMODE((stack.folder / "home" / "run.json").stat().st_mode) == 0o600


def test_only_computing_processes_hold_torch(stack: System) -> None:
    def has_torch(role: str) -> bool:
        return "libtorch" in Path(f"/proc/{stack.pid(role)}/maps").read_text()

    assert {role: has_torch(role) for role in SERVING} == {role: role in COMPUTING for role in SERVING}


def test_status_shows_everyone(stack: System) -> None:
    actors = json.loads(shoal(stack, "status", "--json").stdout)["actors"]
    assert {(actor["role"], actor["pid"]) for actor in actors} == {(role, stack.pid(role)) for role in SERVING}
    table = shoal(stack, "status").stdout
    assert all(role in table for role in SERVING)


def test_a_second_system_is_told_what_is_taken(stack: System, tmp_path: Path) -> None:
    same_home = shoal(stack, "up", "--http-port", "0")
    assert same_home.returncode == 2 and "another `shoal up` runs from here" in same_home.stderr
    port = stack.http.rpartition(":")[2]
    same_port = shoal(stack, "up", "--http-port", port, home=str(tmp_path))
    assert same_port.returncode == 2 and f"SHOAL_HTTP_PORT={port}: Address already in use" in same_port.stderr


def test_health_tells_who_is_silent(stack: System) -> None:
    running = Home(stack.folder / "home").read()
    assert running is not None
    environment = {**os.environ, "SHOAL_NATS_URL": running.nats_url}
    base = [sys.executable, "-m", "run.cli", "health"]
    assert subprocess.run([*base, "decode/d0", "gateway/g0"], env=environment, check=False).returncode == 0
    missing = subprocess.run([*base, "decode/d9"], env=environment, check=False, capture_output=True, text=True)
    assert missing.returncode == 1 and missing.stderr == "decode/d9: no answer\n"


def test_chat_streams_and_a_cancel_ends_the_answer_only(stack: System) -> None:
    """In a terminal of its own: one answer to the end, one cut off by Ctrl-C, then /quit."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["env", "TERM=dumb", *command(stack, "chat", "--max-tokens", "80")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        seen = b""

        def read_until(num_prompts: int, num_more: int = 0) -> None:
            nonlocal seen
            while seen.count(b"you> ") < num_prompts:
                seen += os.read(ours, 4096)
            length = len(seen)
            while len(seen) < length + num_more:
                seen += os.read(ours, 4096)

        read_until(1)
        os.write(ours, b"Hello\n")
        read_until(2)
        os.write(ours, b"Again\n")
        read_until(2, num_more=len("Again\r\n") + 1)  # its echo, and the first of the answer
        process.send_signal(signal.SIGINT)
        read_until(3)
        assert b"(cancelled)" in seen
        os.write(ours, b"/quit\n")
        assert process.wait(timeout=20) == 0
    os.close(ours)


def not_a_number(model: Path) -> str:
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(1_000_000)
        weights.write(b"\xff" * 100_000)
    return r"model\.safetensors: \S+ is not a number at \["


def no_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").write_text("garbage")
    return r"tokenizer\.json: not a tokenizer: "


@pytest.mark.parametrize("spoil", [not_a_number, no_tokenizer])
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    """Only who loads it finds out; the terminal says what is wrong and where, and nothing stays."""
    shutil.copytree(DEFAULT_MODEL, tmp_path / "broken")
    said = spoil(tmp_path / "broken")
    environment = {**os.environ, "SHOAL_HOME": str(tmp_path / "home"), "SHOAL_HTTP_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "run.cli", "up"],
        env={**environment, "SHOAL_MODEL": str(tmp_path / "broken")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    _, _, rest = done.stdout.partition("\n")  # the broker's line
    assert re.fullmatch(rf"shoal: SHOAL_MODEL: {re.escape(str(tmp_path))}/broken/{said}.*\n", rest), done.stdout
    assert "Traceback" not in done.stdout + (tmp_path / "home" / "logs" / "decode.log").read_text()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", _nats_port(done.stdout))):
        pass


def _nats_port(output: str) -> int:
    return int(output.partition("nats://127.0.0.1:")[2].split()[0])
