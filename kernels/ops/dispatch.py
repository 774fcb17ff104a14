"""The one place that decides where an operation runs: a CPU tensor takes the torch reference, a CUDA one the kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def by_device(reference: Callable[P, T]) -> Callable[P, T]:
    """`reference`, a function of `kernels/ops/X.py`, or on CUDA the one of the same name in `kernels/ops/gpu/X.py`.

    The device is that of the first argument, a tensor given by position. Triton is imported by the first CUDA tensor,
    never before: it exists on some platforms only, and costs a second. Raises RuntimeError when it is missing then.
    """
    module = f"{reference.__module__.replace('.ops.', '.ops.gpu.')}"

    @wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args[0].is_cuda:
            return _kernel(module, reference.__name__)(*args, **kwargs)
        return reference(*args, **kwargs)

    return call


def _kernel(module: str, name: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{name} on a CUDA device needs triton, which is not installed here") from error
    return found
