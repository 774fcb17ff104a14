"""OS processes as children of a supervisor: readiness, back-off, signal → wait → SIGKILL, and none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bus.server import die_with_parent
from schemas.liveness import ProcessExited
from supervisors.tasks import Child, Ready

log = logging.getLogger("shoal.supervisor")

READY_FD = "SHOAL_READY_FD"
"""Environment variable of a child: the file descriptor it writes to when it is ready (see `tell_ready`)."""


@dataclass(frozen=True)
class Program:
    """What to run, and as whom. `members` are its actors as `role/id`.

    It is ready when it says so (`tell_ready`) or, for a program that cannot, when `probe` returns; within
    `start_timeout_s`. `log_path` gets its output; None: ours does. At `stop_signal` it ends within `shutdown_s`: one
    that takes its time at SIGTERM has another for that.
    """

    name: str
    command: Sequence[str]
    members: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    probe: Callable[[], Coroutine[Any, Any, None]] | None = None
    log_path: Path | None = None
    start_timeout_s: float = 120.0
    shutdown_s: float = 2.0
    stop_signal: signal.Signals = signal.SIGTERM


class ProcessEnded(Exception):
    """A process ended by itself, or was not ready in time."""


class Backoff:
    """How long to wait before the next start: jittered, doubling from `first_s` up to `longest_s`.

    A life longer than `longest_s` is forgiven: the series begins anew. The first start does not wait.
    """

    def __init__(self, chance: random.Random, *, first_s: float = 0.1, longest_s: float = 10.0) -> None:
        self._chance = chance
        self._first_s = first_s
        self._longest_s = longest_s
        self._num_short_lives = 0

    def delay_s(self) -> float:
        """The wait before a start now: between half and all of the current step."""
        if self._num_short_lives == 0:
            return 0.0
        step_s = min(self._longest_s, self._first_s * 2.0 ** min(self._num_short_lives - 1, 30))
        return step_s * self._chance.uniform(0.5, 1.0)

    def lived(self, life_s: float) -> None:
        """A life has ended after `life_s`."""
        self._num_short_lives = 1 if life_s > self._longest_s else self._num_short_lives + 1


class Process:
    """A program as a supervisor's child. It leads a process group of its own, and dies with us whatever happens.

    `on_exit` hears of the end of each life, once the whole group is gone.
    """

    def __init__(self, program: Program, *, backoff: Backoff, on_exit: Callable[[ProcessExited], None]) -> None:
        self.program = program
        self.pid: int | None = None
        self._backoff = backoff
        self._on_exit = on_exit

    def child(self) -> Child:
        """This process for a supervisor's list."""
        return Child(self.program.name, self.run, shutdown_s=self.program.shutdown_s + 1.0)

    def leave(self) -> bool:
        """SIGTERM: it is to see off what it has, and end. False if it is not there just now, and has nothing."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, signal.SIGTERM)
        return self.pid is not None

    def kill(self) -> None:
        """SIGKILL to the whole group, now. Works on a stopped process too."""
        if self.pid is not None:
            _kill_group(self.pid)

    async def run(self, ready: Ready) -> None:
        """One life: start, be ready, run until it ends (ProcessEnded unless with status 0) or we are cancelled."""
        await asyncio.sleep(self._backoff.delay_s())
        loop = asyncio.get_running_loop()
        born_s = loop.time()
        read_fd, write_fd = os.pipe()
        try:
            try:
                process = await self._spawn(write_fd)
            finally:
                os.close(write_fd)
            self.pid = process.pid
            try:
                await self._until_ready(read_fd)
                ready()
                await process.wait()
            finally:
                await self._end(process)
                self._backoff.lived(loop.time() - born_s)
        finally:
            os.close(read_fd)
        if process.returncode != 0:
            raise ProcessEnded(f"{self.program.name} {_say(process.returncode)}")

    async def _spawn(self, write_fd: int) -> asyncio.subprocess.Process:
        program = self.program
        output = None if program.log_path is None else program.log_path.open("ab")
        try:
            return await asyncio.create_subprocess_exec(
                *program.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **program.environment, READY_FD: str(write_fd)},
                pass_fds=(write_fd, *program.pass_fds),
                start_new_session=True,  # a Ctrl-C in the terminal reaches us only, and we stop children in order
                preexec_fn=die_with_parent(),
            )
        finally:
            if output is not None:
                output.close()

    async def _until_ready(self, read_fd: int) -> None:
        """Return when the child has written to its ready pipe, or the probe has; raise if it ended or took too long."""
        loop = asyncio.get_running_loop()
        program = self.program
        is_readable = asyncio.Event()
        loop.add_reader(read_fd, is_readable.set)  # also when the child closes it, by ending
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(is_readable.wait())]
        if program.probe is not None:
            waiting.append(asyncio.create_task(program.probe()))
        try:
            await asyncio.wait(waiting, timeout=program.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if len(waiting) > 1 and waiting[1].done():
                waiting[1].result()
            elif not is_readable.is_set():
                raise ProcessEnded(f"{program.name} was not ready within {program.start_timeout_s:g} s")
            elif not os.read(read_fd, 1):
                raise ProcessEnded(f"{program.name} ended before it was ready")
        finally:
            loop.remove_reader(read_fd)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(self.program.stop_signal)
            try:
                async with asyncio.timeout(self.program.shutdown_s):
                    await process.wait()
            except TimeoutError:
                log.warning("%s did not end within %g s of its signal", self.program.name, self.program.shutdown_s)
        _kill_group(process.pid)
        await process.wait()
        self.pid = None
        self._on_exit(ProcessExited(name=self.program.name, pid=process.pid, members=list(self.program.members)))


def tell_ready() -> None:
    """In a child: tell the supervisor that we are ready. Does nothing when nobody asked to be told."""
    fd = os.environ.pop(READY_FD, None)
    if fd is not None:
        os.write(int(fd), b"\n")
        os.close(int(fd))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them are gone already


def _say(returncode: int | None) -> str:
    assert returncode is not None
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
