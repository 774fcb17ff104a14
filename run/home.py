"""SHOAL_HOME: what a running stack leaves there for `shoal status` and `shoal chat`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from run.settings import Settings, SettingsError


class Client(msgspec.Struct, frozen=True):
    """A NATS client's credentials. All empty but the prefix when the broker is not ours and we know none."""

    user: str = ""
    password: str = ""
    inbox_prefix: str = "_INBOX"


class Ready(msgspec.Struct, frozen=True):
    """The ready file: what others script against, once everything answers. `pids` are by role."""

    http: str
    nats: str
    client: Client
    models: list[str]
    pids: dict[str, list[int]]


class Running(msgspec.Struct, frozen=True):
    """run.json: the stack that runs from this home. `nats_url` holds the internal user's password."""

    pid: int
    http: str
    nats_url: str


class Home:
    """A folder that one running stack at a time may use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run_file = folder / "run.json"
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and claim it. Raises SettingsError if another stack runs from it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise SettingsError(
                f"SHOAL_HOME={self.folder}: another `shoal up` runs from here; stop it, or set SHOAL_HOME to another "
                "folder for a second one"
            ) from None
        self._lock = lock

    def release(self) -> None:
        """Let the next one have it. Idempotent."""
        if self._lock is not None:
            self._run_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def log_path(self, process: str) -> Path:
        """Where a process of this run writes; emptied when the run begins."""
        folder = self.folder / "logs"
        folder.mkdir(exist_ok=True)
        path = folder / f"{process}.log"
        path.write_bytes(b"")
        return path

    def write(self, running: Running) -> None:
        """Say what runs here."""
        write_private(self._run_file, msgspec.json.encode(running))

    def read(self) -> Running | None:
        """What runs here, or None. A file left by a stack that was killed does not count: nobody holds its lock."""
        try:
            with (self.folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except BlockingIOError:
            return msgspec.json.decode(self._run_file.read_bytes(), type=Running) if self._run_file.exists() else None


def write_private(path: Path, content: bytes) -> None:
    """Replace a file by one that only its owner may read, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    temporary.replace(path)


def find_broker(settings: Settings) -> str:
    """The URL of the broker that is set, or of the stack that runs from SHOAL_HOME. Raises SettingsError."""
    running = Home(settings.home).read()
    if nats_url := settings.nats_url or (running.nats_url if running else ""):
        return nats_url
    raise SettingsError(
        f"no stack runs from {settings.home} (SHOAL_HOME) and SHOAL_NATS_URL is not set; start one with `shoal up`"
    )
