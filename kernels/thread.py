"""A thread of its own for computation, so that the loop of whoever awaits it always answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


class ComputeThread:
    """One thread that uses `num_threads` cores; the thread count of torch belongs to the thread that computes."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(num_threads,))

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done after all that was asked for before. When cancelled, it still ends first."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # or the loop complains that nobody asked for it
            raise

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
