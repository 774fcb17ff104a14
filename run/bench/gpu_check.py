"""Every kernel against its reference on a CUDA GPU, then timed; then a model: `python -m run.bench.gpu_check`.

Bytes moved are what a call must read and write at least, whatever the kernel does; bandwidth is that of a large copy in
the same run. Ends with 1 when a kernel or the model disagrees or a row's bits depend on its batch; without a GPU it
says so, with 0.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from run.bench.gpu_case import REAL, Case, Draw, cut_to, difference, mapped
from run.bench.gpu_cases import CASES
from run.bench.gpu_model import check_model
from run.settings import DEFAULT_MODEL

_COPY_BYTES = 1 << 30
_REPEATS = 20
# What a GPU's own exponentials, roots and sums may add to a case's tolerance, which interpreted arithmetic meets.
_SLACK = 2e-6


@dataclass(frozen=True)
class Result:
    """One case: relative RMS difference, whether its last row alone has the same bits, microseconds, bytes."""

    case: Case
    error: float
    same_alone: bool
    time_us: float
    moved_bytes: int

    @property
    def passed(self) -> bool:
        return self.same_alone and self.error <= self.case.tolerance + _SLACK * (self.case.tolerance > 0)


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA GPU here, nothing was checked")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e9:.0f} GB/s\n")
    print(f"{'kernel':38} {'error':>9} {'allowed':>9} {'alone':>6} {'us':>9} {'MB':>9} {'GB/s':>7} {'of copy':>8}")
    failures = 0
    for case in CASES:
        try:
            result = check(case)
        except Exception:  # one broken kernel must not hide what the others do
            failures += 1
            print(f"{case.name:38} FAILED\n{traceback.format_exc()}")
            continue
        failures += not result.passed
        print(line(result, bandwidth), flush=True)
    print(f"\n{len(CASES) - failures} of {len(CASES)} passed")
    model = check_model(DEFAULT_MODEL, "cuda")
    print(f"{DEFAULT_MODEL.name}: {model}")
    return 1 if failures or not model.passed else 0


def line(result: Result, bandwidth: float) -> str:
    """A row of the table; `bandwidth` in bytes per second."""
    rate = result.moved_bytes / (result.time_us * 1e-6)
    alone = "same" if result.same_alone else "NO"
    return (
        f"{result.case.name:38} {result.error:9.1e} {result.case.tolerance:9.1e} {alone:>6}"
        f" {result.time_us:9.1f} {result.moved_bytes / 1e6:9.2f} {rate / 1e9:7.0f} {rate / bandwidth:8.1%}"
        f"{'' if result.passed else '  FAILED'}"
    )


def check(case: Case) -> Result:
    args = case.make(Draw(REAL))
    want = case.reference(mapped(args, torch.Tensor.clone))
    on_gpu = mapped(args, torch.Tensor.cuda)
    got = mapped(case.kernel(mapped(on_gpu, torch.Tensor.clone)), torch.Tensor.cpu)
    alone = mapped(case.kernel(cut_to(case, on_gpu, slice(-1, None))), torch.Tensor.cpu)
    same_alone = difference(alone, mapped(got, lambda tensor: tensor[-1:])) == 0
    time_us = timed(lambda: case.kernel(on_gpu))
    return Result(case, difference(got, want), same_alone, time_us, case.moved_bytes(args, want))


def timed(call: Callable[[], Any]) -> float:
    """Median microseconds of a call on the device, its inputs no longer in the cache."""
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    call()
    event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    times: list[float] = []
    for _ in range(_REPEATS):
        cache.zero_()
        start, end = event(), event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[_REPEATS // 2]


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of the best of some large copies."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * _COPY_BYTES / (time.perf_counter() - start_s))
    return best


if __name__ == "__main__":
    sys.exit(main())
