"""The thread that computes: order, cancellation, closing."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
import torch

from kernels.thread import ComputeThread
from tests.conftest import Run


def test_work_runs_in_order_in_one_thread_with_its_threads(run_async: Run) -> None:
    async def main() -> None:
        thread, seen = ComputeThread("test", 2), []

        def work(number: int) -> None:
            seen.append((number, threading.get_ident(), torch.get_num_threads()))

        await asyncio.gather(*[thread.run(partial(work, number)) for number in range(3)])
        assert [n for n, _, _ in seen] == [0, 1, 2]
        assert len({ident for _, ident, _ in seen}) == 1 and seen[0][2] == 2
        assert seen[0][1] != threading.get_ident()
        thread.close()
        thread.close()

    run_async(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancel_waits_for_the_end_however_often_it_comes(run_async: Run, fails: bool) -> None:
    async def main() -> None:
        thread, started, go = ComputeThread("test", 1), threading.Event(), threading.Event()
        ended: list[bool] = []

        def work() -> None:
            started.set()
            go.wait()
            ended.append(True)
            if fails:
                raise ValueError("nobody hears this")

        task = asyncio.ensure_future(thread.run(work))
        while not started.is_set():
            await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        assert not task.done() and not ended
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        thread.close()

    run_async(main())
