"""Compiles every kernel for one GPU, without having it: `python -m tests.kernels.gpu.compile_all`.

Host functions run on CPU tensors under a driver that only names its target; a launch compiles and does not run. Prints
JSON: the shared memory of each kernel in bytes, and the cases whose machine code depends on the number of rows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from run.bench.gpu_case import WIDE, Draw
from run.bench.gpu_cases import CASES

ROW_COUNTS = (2, 1, 16)  # the compiler treats 1 and multiples of 16 in its own way where it may


class _Named:
    """A driver without a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    triton.runtime.driver.set_active(_Named())
    run = JITFunction.run
    shared: dict[str, int] = {}
    hashes: set[str] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        name = self.fn.__name__
        shared[name] = max(shared.get(name, 0), compiled.metadata.shared)
        hashes.add(compiled.hash)
        return compiled

    JITFunction.run = compile_only
    torch.empty = torch.ones  # what no kernel writes is read here; all ones are valid everywhere
    varying = []
    for case in CASES:
        code = []
        for rows in ROW_COUNTS:
            hashes.clear()
            case.kernel(case.make(Draw(WIDE._replace(rows=rows))))
            code.append(set(hashes))
        if any(other != code[0] for other in code):
            varying.append(case.name)
    json.dump({"shared": shared, "varying": varying}, sys.stdout)


if __name__ == "__main__":
    main()
