"""The ranks that hold the experts of a model together and step together (design §2, "group")."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from kernels.engine import GroupError


@dataclass(frozen=True)
class GroupSpec:
    """Which of how many ranks this one is. Rank 0 listens at `address` (host:port), where the others find it.

    `timeout_s`: for how long a rank waits for another, in a step and when they meet; `num_redundant`: how many copies
    of experts there are at least in each layer.
    """

    rank: int
    size: int
    address: str
    timeout_s: float
    num_redundant: int = 0


class Group:
    """Exchanges among the ranks of a group, over gloo on a CPU and NCCL on a GPU. Every rank makes the same calls in
    the same order, from one thread; each raises GroupError once a rank is gone, after `timeout_s` at the latest.
    """

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        self.rank, self.size, self.num_redundant, self.device = spec.rank, spec.size, spec.num_redundant, device
        self.exchange_ns = 0
        """Spent in exchanges, waiting for others included."""
        self.generation = 0
        """Drawn by rank 0 whenever the ranks meet."""
        self._spec = spec
        self._store: dist.TCPStore | None = None
        self._backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None

    def join(self) -> None:
        """Meet the other ranks. Raises GroupError when not all come in time."""
        spec, timeout = self._spec, timedelta(seconds=self._spec.timeout_s)
        host, _, port = spec.address.rpartition(":")
        try:
            self._store = dist.TCPStore(
                host, int(port), spec.size, spec.rank == 0, timeout=timeout, wait_for_workers=False
            )
            if spec.rank == 0:
                self._store.set("generation", str(secrets.randbits(48)))
            self.generation = int(self._store.get("generation"))
            if self.device.type == "cuda":
                self._backend = dist.ProcessGroupNCCL(self._store, spec.rank, spec.size, timeout)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._timeout = timeout
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                self._backend = dist.ProcessGroupGloo(self._store, spec.rank, spec.size, options)
        except (RuntimeError, ValueError) as error:
            raise self._broken("no meeting of all ranks", error) from None

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
        """Let go of the others. Idempotent, also after a failure."""
        self._backend = self._store = None

    def _all_to_all(self, rows: torch.Tensor, received: list[int] | None, sent: list[int] | None) -> torch.Tensor:
        if self._backend is None:
            raise GroupError(f"rank {self.rank} has not joined its group, or left it")
        started_ns = time.perf_counter_ns()
        num = len(rows) if received is None else sum(received)
        out = rows.new_empty(num, *rows.shape[1:])
        try:
            work = self._backend.alltoall_base(
                out, rows.contiguous(), received or [], sent or [], dist.AllToAllOptions()
            )
            work.wait()
        except RuntimeError as error:
            raise self._broken("an exchange failed", error) from None
        self.exchange_ns += time.perf_counter_ns() - started_ns
        return out

    def _broken(self, what: str, error: Exception) -> GroupError:
        why = str(error).partition("\n")[0].partition("] ")[2] or str(error)  # without the library's own source line
        return GroupError(f"rank {self.rank} of {self.size} at {self._spec.address}: {what}: {why.partition('. ')[0]}")
