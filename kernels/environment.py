"""Environment variables of a process that computes; they count only when set before torch is imported."""

from __future__ import annotations


def compute_environment(num_threads: int) -> dict[str, str]:
    """What a supervisor adds to the environment of a worker that may use `num_threads` cores.

    Waiting threads sleep instead of spinning: several such processes share the cores, and a spinning thread takes its
    neighbour's. Free of torch, so that a supervisor can call it.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # what a group's end means is said by us, in one line
    }
