"""The ranks that hold the experts of a model together and step together (design §2, "group"; §6)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from kernels.grouping import GroupError

dist: Any = torch.distributed  # its stubs lack most of what is used here

MEET_S = 5.0
"""For so long a rank waits for the others to come to a meeting: all of them have said that they wait for it."""


@dataclass(frozen=True)
class GroupSpec:
    """A group as it is meant to be, of `size` ranks, and which of them this one is: so its weights are loaded.

    `timeout_s`: for how long a rank waits for another in a step; `num_redundant`: copies beyond one of each expert, at
    least so many in each layer. `host`: this machine, as the other ranks reach it.
    """

    rank: int
    size: int
    timeout_s: float
    num_redundant: int = 0
    host: str = "127.0.0.1"


class Group:
    """Exchanges among ranks that have met, over gloo on a CPU and NCCL on a GPU. Every rank makes the same calls in
    the same order, from one thread; each raises GroupError once a rank is gone, after `timeout_s` at the latest. Those
    that are left may meet again.
    """

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        self.rank, self.size, self.num_redundant, self.device = spec.rank, spec.size, spec.num_redundant, device
        self.generation = 0
        """The same on all ranks that have met, and a greater one each time."""
        self.exchange_ns = 0
        """Spent in exchanges, waiting for others included."""
        self._spec = spec
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._backend: Any = None
        self._is_met = False

    def listen(self) -> str:
        """Where this rank can be met as the first one, host:port: any free port."""
        self._close_listener()
        # Left to itself the store would listen on all networks of the machine.
        self._listener = socket.create_server((self._spec.host, 0), backlog=1024)
        return f"{self._spec.host}:{self._listener.getsockname()[1]}"

    def meet(self, generation: int, rank: int, size: int, address: str) -> None:
        """Meet the others, as `rank` of `size`. Raises GroupError when not all come in time."""
        self.leave()
        self.generation, self.rank, self.size = generation, rank, size
        try:
            if size > 1:
                self._connect(address)
            self._is_met = True
        except (RuntimeError, ValueError, OSError) as error:
            self.leave()
            raise self._broken("no meeting of all ranks", error) from None
        finally:
            self._close_listener()

    def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        end_s = time.monotonic() + MEET_S
        listening = self._listener.detach() if self.rank == 0 and self._listener is not None else None
        left = timedelta(seconds=MEET_S)
        store = self._store = dist.TCPStore(
            *(host, int(port), self.size, self.rank == 0),
            timeout=left,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        store.set(f"{self.generation} {self.rank}", "here")
        left = timedelta(seconds=max(end_s - time.monotonic(), 0.001))
        store.wait([f"{self.generation} {rank}" for rank in range(self.size)], left)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._spec.timeout_s)
            self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=self._spec.timeout_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._spec.host)]
            self._backend = dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def agree(self, said: Sequence[int]) -> npt.NDArray[np.int64]:
        """What each rank said: [ranks, numbers]."""
        mine = torch.tensor(said, dtype=torch.int64, device=self.device).repeat(self.size, 1)
        return self._all_to_all(mine, None, None).cpu().numpy()

    def ask(
        self, rows: torch.Tensor, counts: torch.Tensor, answer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Send `rows` [n, k] to the ranks, in their order, `counts` [ranks] to each; what they `answer` to them comes
        back in the same order, [n, m]. `answer` gets all rows that are for this rank and makes a row of each."""
        received = self._all_to_all(counts, None, None).tolist()
        sent = counts.tolist()
        answers = answer(self._all_to_all(rows, received, sent))
        return self._all_to_all(answers, sent, received)

    def leave(self) -> None:
        """Let go of the others. Idempotent, also after a failure; from any thread."""
        self._backend = self._store = None
        self._is_met = False

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _all_to_all(self, rows: torch.Tensor, received: list[int] | None, sent: list[int] | None) -> torch.Tensor:
        backend = self._backend  # from another thread the group may be left at any time
        if not self._is_met or (backend is None and self.size > 1):
            raise GroupError(f"rank {self.rank} of {self.size} has not met the others, or left them")
        if backend is None:
            return rows
        started_ns = time.perf_counter_ns()
        num = len(rows) if received is None else sum(received)
        out = rows.new_empty(num, *rows.shape[1:])
        try:
            work = backend.alltoall_base(
                out, rows.contiguous(), received or [], sent or [], dist.AllToAllOptions()
            )
            work.wait()
        except RuntimeError as error:
            raise self._broken("an exchange failed", error) from None
        self.exchange_ns += time.perf_counter_ns() - started_ns
        return out

    def _broken(self, what: str, error: Exception) -> GroupError:
        why = str(error).partition("\n")[0].partition("] ")[2] or str(error)  # without the library's own source line
        return GroupError(f"rank {self.rank} of {self.size}: {what}: {why.partition('. ')[0]}")
