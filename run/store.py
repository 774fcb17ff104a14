"""SHOAL_STORE: the folder of cached blocks, seen to before anything starts."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from run.cluster import ProcessSpec
from run.settings import SettingsError
from schemas.message import Role

log = logging.getLogger("shoal.store")


class Store:
    """A folder that the writers of one running stack at a time may use: they take their slabs by their names.

    The locks that say so lie in the folder, for whoever has it mounted elsewhere, and, where there is a place for one,
    beside it: a folder deleted under a running stack is made again by a writer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: list[int] = []

    def acquire(self) -> None:
        """Make the folder and claim it. Raises SettingsError when that cannot be, or if another stack uses it."""
        need_folder(self.folder)
        folder = self.folder.resolve()
        try:
            self._lock(folder / "lock")
        except OSError as error:
            raise SettingsError(_cannot(self.folder, f"lock: {error.strerror}")) from None
        try:
            self._lock(folder.parent / f"{folder.name}.lock")
        except OSError as error:
            log.info("no lock beside %s: %s", self.folder, error.strerror)

    def release(self) -> None:
        """Let the next one have it. Idempotent."""
        while self._locks:
            os.close(self._locks.pop())

    def _lock(self, path: Path) -> None:
        """Raises SettingsError if another stack has it, OSError if there can be none."""
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._locks.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise SettingsError(
                f"SHOAL_STORE={self.folder}: another `shoal up` stores its blocks here; stop it, or set SHOAL_STORE to "
                "another folder for a second one"
            ) from None
        except OSError as error:  # of a file system without locks
            log.warning("%s cannot be locked (%s): see to it that no second stack uses it", path, error)


def need_folder(folder: Path, setting: str = "SHOAL_STORE") -> None:
    """Make a folder that can be written. Raises SettingsError, which names the setting, when that cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(_cannot(folder, str(error.strerror), setting)) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(_cannot(folder, "it cannot be written", setting))


def stores(specs: tuple[ProcessSpec, ...]) -> bool:
    """Whether any of these processes writes blocks."""
    return any(member.role is Role.WRITER for spec in specs for member in spec.members)


def _cannot(folder: Path, why: str, setting: str = "SHOAL_STORE") -> str:
    return f"{setting}={folder}: {why}; set it to a folder you can write"
