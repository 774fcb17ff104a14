"""A whole system as processes, started once for all tests of this folder."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import nats
import openai
import pytest
from nats.aio.client import Client

from run.home import Client as Credentials
from run.home import Ready
from schemas.message import Role
from tests.untrained import untrained

TENANTS = """
[tenants.acme]
nats_password = "word-of-acme"
requests_per_minute = 2
[tenants.beta]
nats_password = "word-of-beta"
"""
"""Of NATS clients only: with keys, HTTP clients would have to have one."""


SERVING = [role for role in Role if role is not Role.EXPERT_BALANCER]
"""Who runs by default: without groups there is nothing for the other one."""


class System:
    """`shoal up` as a child: its ready file, its output, and its end. The model is untrained, unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str] | None = None,
        *,
        ready_file: Path | None = None,
        cluster: Path | None = None,
        start_s: float = 50.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ready_file = ready_file or folder / "home" / "ready.json"
        told = ["--ready-file", str(ready_file)] if ready_file else []
        told += ["--cluster", str(cluster)] if cluster else []
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "OTEL_"))}
        ours = {"SHOAL_HTTP_PORT": "0", "SHOAL_HOME": str(folder / "home"), "SHOAL_MODEL": str(untrained())}
        self.output = folder / "output.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "run.cli", "up", *told],
                env={**clean, **ours, **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        try:
            wait_for(lambda: self.ready_file.exists() or self.process.poll() is not None, start_s)
            assert self.process.poll() is None and self.ready_file.exists(), self.output.read_text()
        except BaseException:
            self.process.kill()
            raise

    @property
    def ready(self) -> Ready:
        """The ready file, as it is now."""
        return msgspec.json.decode(self.ready_file.read_bytes(), type=Ready)

    @property
    def http(self) -> str:
        return self.ready.http

    def pid(self, role: str) -> int:
        """The process that runs a role (the first, if there are several)."""
        return self.ready.pids[role][0]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C, and wait: none of its processes is left then, and nobody listens where it did."""
        pids = [pid for pids in self.ready.pids.values() for pid in pids if pid]
        places = [self.http, self.ready.nats]
        self.process.send_signal(number)
        try:
            status = self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        wait_for(lambda: not any(map(is_alive, pids)) and not any(map(is_open, places)), 10.0)
        return status

    @asynccontextmanager
    async def client(self, tenant: str = "") -> AsyncIterator[Client]:
        """A NATS client with the client user's rights, or those of a tenant."""
        user = self.ready.client
        if tenant:
            user = Credentials(user=tenant, password=f"word-of-{tenant}", inbox_prefix=f"_INBOX.tenant.{tenant}")
        connection = await nats.connect(
            self.ready.nats, user=user.user, password=user.password, inbox_prefix=user.inbox_prefix.encode()
        )
        try:
            yield connection
        finally:
            await connection.close()


def is_open(place: str) -> bool:
    """Whether somebody listens there. A process's last threads may hold its sockets a moment longer than its pid."""
    host, port = place.rpartition("/")[2].split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """A zombie is not alive."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(is_true: Callable[[], Any], limit_s: float) -> None:
    """Wait for something another process does. Fails after `limit_s`."""
    import time

    end_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


async def until(is_true: Callable[[], Any], limit_s: float = 30.0) -> None:
    """As `wait_for`, on the loop."""
    async with asyncio.timeout(limit_s):
        while not is_true():
            await asyncio.sleep(0.02)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for all tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("stack")
    (folder / "tenants.toml").write_text(TENANTS)
    system = System(folder, {"SHOAL_TENANTS": str(folder / "tenants.toml")}, ready_file=folder / "ready.json")
    yield system
    system.stop()


@pytest.fixture
def ai(stack: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def sdk(stack: System) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.http, api_key="none", max_retries=0) as client:
        yield client
