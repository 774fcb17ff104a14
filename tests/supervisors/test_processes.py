"""Real processes: readiness, ends of every kind, back-off, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.liveness import ProcessExited
from supervisors.processes import Backoff, Process, ProcessEnded, Program
from supervisors.strategy import GaveUp
from supervisors.tasks import Supervisor
from tests.conftest import Run as RunAsync

READY = "import os; fd = int(os.environ['SHOAL_READY_FD']); os.write(fd, b'\\n'); os.close(fd)\n"
SLEEP = READY + "import time; time.sleep(600)\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


class Log:
    """Exits as the supervisor reports them."""

    def __init__(self) -> None:
        self.exits: list[ProcessExited] = []

    def process(self, name: str, code: str, **settings: float | Path | signal.Signals) -> Process:
        program = Program(name, [sys.executable, "-c", code], members=[f"decode/{name}"], **settings)  # type: ignore[arg-type]
        return Process(program, backoff=Backoff(random.Random(1), first_s=0.01), on_exit=self.exits.append)


def is_alive(pid: int) -> bool:
    """Not gone, and not a zombie that somebody has yet to reap."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def until(condition: Callable[[], bool]) -> None:
    """Poll: the kernel does not tell us of processes that are not our children."""
    while not condition():
        await asyncio.sleep(0.01)


async def until_gone(*pids: int) -> None:
    await until(lambda: not any(is_alive(pid) for pid in pids))


async def up(process: Process) -> tuple[asyncio.Task[None], int]:
    """Run one life until it is ready."""
    is_ready = asyncio.Event()
    task = asyncio.create_task(process.run(is_ready.set))
    waiting = asyncio.create_task(is_ready.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    assert process.pid is not None
    return task, process.pid


def test_sigterm_ends_it_and_its_exit_is_reported(run_async: RunAsync) -> None:
    async def main() -> None:
        log = Log()
        process = log.process("p0", SLEEP)
        task, pid = await up(process)
        assert is_alive(pid) and os.getpgid(pid) == pid != os.getpgid(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(pid) and process.pid is None and not process.leave()
        assert log.exits == [ProcessExited(name="p0", pid=pid, members=["decode/p0"])]

    run_async(main())


@pytest.mark.parametrize("how", ["deaf", "stopped"])
def test_sigkill_ends_what_does_not_listen(run_async: RunAsync, how: str) -> None:
    async def main() -> None:
        task, pid = await up(Log().process("p0", DEAF if how == "deaf" else SLEEP, shutdown_s=0.1))
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(pid)

    run_async(main())


def test_it_is_ended_by_its_own_signal(run_async: RunAsync, tmp_path: Path) -> None:
    """One that takes its time at SIGTERM, as a node does."""

    async def main() -> None:
        note = tmp_path / "note"
        log = f"lambda *_: (pathlib.Path({str(note)!r}).write_text('quick'), sys.exit(0))"
        code = f"import pathlib, sys, signal\nsignal.signal(signal.SIGINT, {log})\n" + DEAF
        task, _ = await up(Log().process("p0", code, stop_signal=signal.SIGINT))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert note.read_text() == "quick"

    run_async(main())


def test_its_own_children_go_with_it(run_async: RunAsync, tmp_path: Path) -> None:
    async def main() -> None:
        note = tmp_path / "grandchild"
        code = (
            "import subprocess, sys, pathlib\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n" + SLEEP
        )
        task, pid = await up(Log().process("p0", code))
        grandchild = int(note.read_text())
        assert is_alive(grandchild)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessEnded, match="p0 was killed by SIGKILL"):
            await task
        await until_gone(grandchild)

    run_async(main())


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise SystemExit(3)", "p0 ended before it was ready"),
        (READY + "raise SystemExit(3)", "p0 ended with status 3"),
        ("import time; time.sleep(600)", "p0 was not ready within 0.3 s"),
    ],
)
def test_ends_of_its_own(run_async: RunAsync, code: str, error: str) -> None:
    async def main() -> None:
        log = Log()
        with pytest.raises(ProcessEnded, match=error):
            await log.process("p0", code, start_timeout_s=0.3 if "sleep" in code else 30.0).run(lambda: None)
        assert [exit.name for exit in log.exits] == ["p0"]

    run_async(main())


def test_a_probe_stands_in_for_programs_that_cannot_say_they_are_ready(run_async: RunAsync) -> None:
    async def main() -> None:
        is_up = asyncio.Event()

        def process(code: str) -> Process:
            program = Program("p0", [sys.executable, "-c", code], probe=is_up.wait)  # type: ignore[arg-type]
            return Process(program, backoff=Backoff(random.Random(1)), on_exit=lambda exited: None)

        starting = asyncio.create_task(up(process("import time; time.sleep(600)")))
        await asyncio.sleep(0.05)
        assert not starting.done()
        is_up.set()
        task, pid = await starting
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(pid)
        is_up.clear()
        with pytest.raises(ProcessEnded, match="ended before it was ready"):
            await up(process("pass"))

    run_async(main())


def test_status_zero_is_a_normal_end(run_async: RunAsync) -> None:
    async def main() -> None:
        await Log().process("p0", READY).run(lambda: None)

    run_async(main())


def test_output_goes_to_its_log(run_async: RunAsync, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "p0.log"
        code = "import sys; print('out'); print('err', file=sys.stderr)\n" + READY
        for _ in range(2):  # a restart appends
            await Log().process("p0", code, log_path=path).run(lambda: None)
        assert sorted(path.read_text().split()) == ["err", "err", "out", "out"]

    run_async(main())


def test_killed_children_come_back_in_a_supervisor(run_async: RunAsync) -> None:
    async def main() -> None:
        log = Log()
        first, second = log.process("a", SLEEP), log.process("b", SLEEP)
        is_up = asyncio.Event()
        task = asyncio.create_task(Supervisor("root", [first.child(), second.child()]).run(is_up.set))
        await is_up.wait()
        old, other = first.pid, second.pid
        assert old is not None and other is not None
        os.kill(old, signal.SIGKILL)
        await until(lambda: first.pid not in (None, old))
        assert second.pid == other
        new = first.pid
        assert new is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(is_alive(pid) for pid in (old, new, other))

    run_async(main())


def test_a_child_that_cannot_start_stops_those_before_it(run_async: RunAsync) -> None:
    async def main() -> None:
        log = Log()
        good, bad = log.process("good", SLEEP), log.process("bad", "raise SystemExit(1)")
        with pytest.raises(GaveUp, match="bad did not start.*ended before it was ready"):
            await Supervisor("root", [good.child(), bad.child()]).run(lambda: None)
        assert [exit.name for exit in log.exits] == ["bad", "good"]

    run_async(main())


def test_sigkill_of_the_root_leaves_nothing(run_async: RunAsync) -> None:
    """The root supervises two processes, one of which does not listen to SIGTERM; then it is killed."""
    root = textwrap.dedent(f"""
        import asyncio, random, sys
        from supervisors.processes import Backoff, Process, Program
        from supervisors.tasks import Supervisor

        def process(name, code):
            program = Program(name, [sys.executable, "-c", code])
            return Process(program, backoff=Backoff(random.Random(1)), on_exit=lambda exited: None)

        async def main():
            a, b = process("a", {SLEEP!r}), process("b", {DEAF!r})
            await Supervisor("root", [a.child(), b.child()]).run(lambda: print(a.pid, b.pid, flush=True))

        asyncio.run(main())
    """)

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", root, stdout=subprocess.PIPE)
        assert process.stdout is not None
        pids = [int(pid) for pid in (await process.stdout.readline()).split()]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        process.kill()
        await process.wait()
        await until_gone(*pids)

    run_async(main())


def test_backoff_doubles_with_jitter_up_to_its_longest_and_forgives_a_long_life() -> None:
    backoff = Backoff(random.Random(7), first_s=0.1, longest_s=10.0)
    assert backoff.delay_s() == 0.0
    delays = []
    for _ in range(12):
        backoff.lived(1.0)
        delays.append(backoff.delay_s())
    steps = [0.1 * 2**i for i in range(7)] + [10.0] * 5
    assert all(step / 2 <= delay <= step for step, delay in zip(steps, delays, strict=True))
    assert len({delay / step for step, delay in zip(steps, delays, strict=True)}) == 12
    backoff.lived(10.1)
    assert 0.05 <= backoff.delay_s() <= 0.1
