"""A run on disk: what it goes on from, its log, and its model in the official layout."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from run.checkpoint import DEFAULT_SEED, make
from run.settings import SettingsError


class RunFolder:
    """`model/` in `path`, which is a checkpoint like any other; and of what is trained the state and the log, by these
    names. Reports have `step`, `stage`, figures, `num_tokens` and `took_s`."""

    def __init__(self, path: Path, state: str = "state.pt", log: str = "log.jsonl") -> None:
        self.model = path / "model"
        self._state, self._log = path / state, path / log
        self._lock: int | None = None

    def acquire(self) -> None:
        """Claim the folder for this process. Raises SettingsError while another one trains in it, or OSError."""
        self._lock = os.open(self.model.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise SettingsError(
                f"{self.model.parent}: another `shoal train` is at work there; stop it, or give another folder"
            ) from None

    def release(self) -> None:
        """Let the next one have it. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def prepare(self) -> None:
        """Make what a new run begins with: a model, untrained, with its tokenizer. Raises OSError."""
        if not self.has_model:
            make(self.model, DEFAULT_SEED)

    @property
    def has_model(self) -> bool:
        return (self.model / "model.safetensors").exists()

    def load(self) -> dict[str, Any] | None:
        """The last state, or None before the first. Raises ValueError where it cannot be read."""
        if not self._state.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self._state, weights_only=True)
        except Exception:  # of what is no state torch raises whatever it stumbles on
            raise ValueError(f"{self._state}: not a state of a run") from None
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the last state at once or not at all."""
        part = self._state.with_suffix(".part")
        torch.save(state, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(self._state)

    def begin_log(self) -> None:
        """Make the log. Raises OSError where a run could not be saved either."""
        self._log.open("a").close()

    def log(self, reports: Sequence[NamedTuple]) -> None:
        """Append the means of some steps."""
        each = [report._asdict() for report in reports]
        row = {
            "step": each[-1]["step"] + 1,
            "stage": each[-1]["stage"],
            **means(reports),
            "num_tokens": sum(one["num_tokens"] for one in each),
            "took_s": round(sum(one["took_s"] for one in each), 1),
        }
        with self._log.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def truncate_log(self, step: int) -> None:
        """Drop what was logged behind the state that the run goes on from."""
        if self._log.exists():
            lines = self._log.read_text().splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            self._log.write_text("".join(f"{line}\n" for line in kept))


def means(reports: Sequence[NamedTuple]) -> dict[str, float]:
    """The figures of reports, on average."""
    each = [report._asdict() for report in reports]
    figures = [name for name in each[0] if name not in ("step", "stage", "num_tokens", "took_s")]
    return {name: round(sum(one[name] for one in each) / len(each), 4) for name in figures}
