"""The ranks that hold the experts of a model together and step together (design §2, "group")."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from kernels.engine import GroupError

dist: Any = torch.distributed  # its stubs lack most of what is used here

MEET_S = 100.0
"""For so long a rank waits for the others to come: they may take longer to load their weights."""

RETRY_S = 0.05


@dataclass(frozen=True)
class GroupSpec:
    """Which of how many ranks this one is. Rank 0 listens at `address` (host:port), where the others find it.

    `timeout_s`: for how long a rank waits for another in a step, and `meet_s` when they meet; `num_redundant`: copies
    beyond one of each expert, at least so many in each layer. `life` grows from each start of a rank to its next one.
    """

    rank: int
    size: int
    address: str
    timeout_s: float
    num_redundant: int = 0
    meet_s: float = MEET_S
    life: int = field(default_factory=time.time_ns)


class Group:
    """Exchanges among the ranks of a group, over gloo on a CPU and NCCL on a GPU. Every rank makes the same calls in
    the same order, from one thread; each raises GroupError once a rank is gone, after `timeout_s` at the latest.
    """

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        self.rank, self.size, self.num_redundant, self.device = spec.rank, spec.size, spec.num_redundant, device
        self.exchange_ns = 0
        """Spent in exchanges, waiting for others included."""
        self.lives: tuple[int, ...] = ()
        """Of all ranks that have met."""
        self._spec = spec
        self._store: Any = None
        self._backend: Any = None

    @property
    def generation(self) -> int:
        """The same on all ranks that have met, and another one each time."""
        return self.lives[0] if self.lives else 0

    def join(self) -> None:
        """Meet the other ranks. Those that have met with an earlier life of this one are waited for, to begin anew.

        Raises GroupError when not all come in time.
        """
        end_s = time.monotonic() + self._spec.meet_s
        while True:
            try:
                self._meet(end_s)
                return
            except (RuntimeError, ValueError, OSError) as error:
                self.leave()
                if time.monotonic() > end_s:
                    raise self._broken("no meeting of all ranks", error) from None
            time.sleep(RETRY_S)

    def _meet(self, end_s: float) -> None:
        spec, left = self._spec, timedelta(seconds=max(end_s - time.monotonic(), 0.001))
        host, _, port = spec.address.rpartition(":")
        listening = _listen(host, int(port)) if spec.rank == 0 else None
        store = self._store = dist.TCPStore(
            *(host, int(port), spec.size, spec.rank == 0),
            timeout=left,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        names = [f"life {rank}" for rank in range(spec.size)]
        store.set(names[spec.rank], str(spec.life))
        if spec.rank == 0:
            store.wait(names, left)
            store.set("met", b",".join(map(store.get, names)))
        lives = tuple(map(int, store.get("met").split(b",")))
        if lives[spec.rank] != spec.life:
            raise ValueError("the others have met with an earlier life of it")
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=spec.timeout_s)
            self._backend = dist.ProcessGroupNCCL(store, spec.rank, spec.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=spec.timeout_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, int(port)))]
            self._backend = dist.ProcessGroupGloo(store, spec.rank, spec.size, options)
        self.lives = lives

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


def _listen(host: str, port: int) -> int:
    """A socket to be listened at: left to itself the store would listen on all networks of the machine."""
    with socket.create_server((host, port), backlog=1024) as server:
        return server.detach()


def _own_address(host: str, port: int) -> str:
    """This machine's on its way to `host`: nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
