"""A process that answers questions, for work that may take too long, or be the end of whoever does it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe


class Busy(Exception):
    """Others are being answered."""


class Ended(Exception):
    """The process has ended on the way to the answer, or was killed as it took too long. `code`: as of subprocess."""

    def __init__(self, code: int) -> None:
        super().__init__(f"ended with {code}")
        self.code = code


class Answerer:
    """One question after the other, asked from threads. The process, `python -m module fd arguments`, is started when
    first needed, and again after its end; it ends with this process, whose end of the pipe `fd` is then closed, or with
    `close`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection

    def answer(self, question: bytes, arguments: Sequence[str], *, wait_s: float, patience_s: float) -> bytes:
        """Raises Busy when its turn does not come within `wait_s`; Ended, at the latest `patience_s` after its turn."""
        if not self._turn.acquire(timeout=wait_s):
            raise Busy
        try:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start(arguments)
            assert self._process is not None
            with contextlib.suppress(EOFError, OSError):
                self._connection.send_bytes(question)
                if self._connection.poll(patience_s):
                    return self._connection.recv_bytes()
                self._process.kill()
            code = self._process.wait()
            self.close()
            raise Ended(code)
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._connection.close()
            self._process.wait()
            self._process = None

    def _start(self, arguments: Sequence[str]) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # whose threads would take address space
            )
