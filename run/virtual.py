"""An event loop whose clock jumps to the next timer: hours in milliseconds, and the same every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump:
    """In the place of a selector: nothing to wait for but time, which passes at once."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise RuntimeError("every task waits, and no timer is set: nothing can ever happen again")
        self.now_s += float(max(timeout_s, 0.0))  # numpy's would go on into messages
        return []

    def close(self) -> None:
        """There is nothing to let go of."""


class VirtualLoop(asyncio.BaseEventLoop):
    """No threads and no sockets: what needs one raises RuntimeError. `time()` starts at 0 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Jump()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._selector.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("no threads under the virtual clock")

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        raise RuntimeError("no threads under the virtual clock")


def run_virtual(work: Coroutine[Any, Any, T], make_loop: Callable[[], VirtualLoop] = VirtualLoop) -> T:
    """Run a coroutine to its end under a virtual clock of its own."""
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(work)
