"""Every kernel: the tests interpret these cases at small odd sizes, `gpu_check` runs them at real ones on a GPU."""

from __future__ import annotations

from run.bench.gpu_cache_cases import CACHE_CASES
from run.bench.gpu_layer_cases import LAYER_CASES

CASES = [*CACHE_CASES, *LAYER_CASES]
