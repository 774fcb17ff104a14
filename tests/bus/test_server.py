"""The embedded server as a file, a command, and a process that nobody has to clean up after."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from nats.aio.client import Client

from bus.bus import BusError
from bus.server import EmbeddedServer, ServerConfig, command, wait_ready
from schemas.failure import Code
from tests.conftest import Run

pytestmark = pytest.mark.nats


def test_only_the_owner_can_read_the_passwords(tmp_path: Path) -> None:
    config = ServerConfig.write(tmp_path / "state", port=0, num_clients=3)
    assert stat.S_IMODE(config.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.path.parent.stat().st_mode) == 0o700
    users = (config.internal, *config.clients)
    assert len({user.password for user in users}) == len({user.user for user in users}) == 4
    assert len({client.inbox_prefix for client in config.clients}) == 3
    again = ServerConfig.write(tmp_path / "state", port=0)
    assert again.internal.password != config.internal.password
    assert config.internal.password not in again.path.read_text()


def test_tenants_have_users_with_the_passwords_they_were_given(tmp_path: Path) -> None:
    config = ServerConfig.write(tmp_path, port=0, tenants={"acme": "a#{word};$HOME//"})
    assert [(user.user, user.tenant, user.inbox_prefix) for user in config.tenants] == [
        ("acme", "acme", "_INBOX.tenant.acme")
    ]

    async def main() -> None:
        server = EmbeddedServer(config)
        await server.start()
        try:
            client = Client()
            await client.connect(f"nats://127.0.0.1:{config.port}", user="acme", password="a#{word};$HOME//")
            assert client.is_connected
            await client.close()
        finally:
            await server.stop()

    asyncio.run(main())


def test_a_taken_port_is_replaced_by_a_free_one(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ServerConfig.write(tmp_path, port=port).port != port
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert ServerConfig.write(tmp_path, port=port).port == port


def test_it_starts_stops_and_starts_again_on_the_same_port(run_async: Run, tmp_path: Path) -> None:
    async def main() -> None:
        config = ServerConfig.write(tmp_path / "state", port=0)
        server = EmbeddedServer(config)
        for _ in range(2):
            await server.start()
            await wait_ready(config)
            await server.stop()
            await server.stop()
            with socket.socket() as probe:
                assert probe.connect_ex((config.host, config.port)) != 0, "the port is still open"

    run_async(main())


def test_another_server_on_the_port_is_not_taken_for_ours(
    run_async: Run, nats_server: ServerConfig, tmp_path: Path
) -> None:
    async def main() -> None:
        ours = ServerConfig.write(tmp_path / "state", port=0)
        stranger = ServerConfig(ours.path, ours.host, nats_server.port, ours.name, ours.internal, ours.clients)
        with pytest.raises(BusError) as caught:
            await wait_ready(stranger, timeout_s=0.1)
        assert caught.value.code == Code.NO_RESPONDERS
        assert "another server" in caught.value.failure.message

    run_async(main())


def test_its_command_names_the_binary_and_the_file(tmp_path: Path) -> None:
    config = ServerConfig.write(tmp_path, port=0)
    binary, *arguments = command(config)
    assert os.access(binary, os.X_OK)
    assert arguments == ["--config", str(config.path)]
    checked = subprocess.run([binary, "-t", *arguments], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys, time
        from pathlib import Path
        from bus.server import EmbeddedServer, ServerConfig
        server = EmbeddedServer(ServerConfig.write(Path(sys.argv[1]), port=0))
        asyncio.run(server.start())
        print(server.config.port, server._process.pid, flush=True)
        time.sleep(600)
        """
    )
    program_and_folder = [sys.executable, "-c", program, str(tmp_path / "state")]
    parent = subprocess.Popen(program_and_folder, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port, pid = map(int, parent.stdout.readline().split())
    with socket.create_connection(("127.0.0.1", port)):
        pass
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while _is_running(pid):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_server_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        config = ServerConfig.write(tmp_path / "state", port=0)
        config.path.write_text("no such option: {")
        server = EmbeddedServer(config)
        with pytest.raises(BusError):
            async with asyncio.timeout(30):
                await server.start()
        assert server._process is None

    asyncio.run(main())
