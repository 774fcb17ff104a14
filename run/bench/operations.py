"""Where the time of an engine step goes: the functions of the arithmetic, each without what it calls."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any

_MODULES = ("attention", "compress", "engram", "experts", "index", "linear", "mix", "pack", "quant", "rope", "rounding")
# Beside these, every function that has a kernel of its own (`kernels/ops/dispatch.py`).
_FUNCTIONS = (
    "attention.attend",
    "engram.table_rows",
    "experts.run_experts",
    "index.candidate_mask",
    "index.scores",
    "index.top_rows",
    "linear.grouped_linear",
    "mix.sinkhorn",
    "pack.unpack",
)
_METHODS = (("layout", "Layout", "__init__"),)


class Clock:
    """Nanoseconds spent in each operation since `reset`, what it calls not included."""

    def __init__(self) -> None:
        self.spent_ns: defaultdict[str, int] = defaultdict(int)
        self._inner_ns = 0

    def reset(self) -> None:
        """Forget all that was counted."""
        self.spent_ns.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted under `name`. For one thread."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer_ns, self._inner_ns = self._inner_ns, 0
            start_ns = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took_ns = time.perf_counter_ns() - start_ns
                self.spent_ns[name] += took_ns - self._inner_ns
                self._inner_ns = outer_ns + took_ns

        return call


@contextmanager
def timed_operations() -> Iterator[Clock]:
    """Replace the operations of `kernels/` by timed ones; models must be loaded inside, as they keep some of them.

    A call costs about a microsecond more, which the functions around it are charged for.
    """
    clock = Clock()
    undo: list[tuple[Any, str, Any]] = []
    for name, function in _operations():
        timed = clock.timed(name, function)
        for module in [module for key, module in sys.modules.items() if key.startswith("kernels.")]:
            for attribute, value in list(vars(module).items()):
                if value is function:
                    undo.append((module, attribute, value))
                    setattr(module, attribute, timed)
    for module_name, class_name, method in _METHODS:
        owner = getattr(import_module(f"kernels.{module_name}"), class_name)
        function = getattr(owner, method)
        undo.append((owner, method, function))
        setattr(owner, method, clock.timed(f"{module_name}.{method.strip('_')}", function))
    try:
        yield clock
    finally:
        for owner, attribute, value in undo:
            setattr(owner, attribute, value)


def _operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _MODULES:
        module = import_module(f"kernels.ops.{name}")
        for attribute, value in list(vars(module).items()):
            if not isinstance(value, FunctionType) or value.__module__ != module.__name__:
                continue
            if hasattr(value, "__wrapped__") or f"{name}.{attribute}" in _FUNCTIONS:
                yield (attribute if attribute == name else f"{name}.{attribute}"), value
