"""A device that is not there: tensors that count as CUDA's while they lie in the host's memory.

Within `PretendCuda` a tensor made with `device="cuda"`, or moved there, is marked, and so is whatever comes of it; it
says `is_cuda`, so operations take their kernels, which Triton interprets. An operation that mixes marked tensors with
others raises, as a GPU would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_MARK = "_pretends_to_be_on_cuda"
_MIXING = ("copy_", "to")  # what may read a tensor of another device


def is_marked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _MARK in value.__dict__


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def marked(value: Any) -> Any:
    for tensor in tensors(value):
        tensor.__dict__[_MARK] = True
    return value


class PretendCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        if name in ("cpu", "numpy", "to", "cuda"):
            return self._moved(func, name, args, kwargs)
        given = list(tensors([args, kwargs]))
        on_device = any(is_marked(tensor) for tensor in given)
        if kwargs.get("device") is not None:
            assert not given or name.startswith(("new_", "empty_like", "zeros_like", "full_like")), name
            on_device = torch.device(kwargs.pop("device")).type == "cuda"
        elif on_device and name not in _MIXING:
            strangers = [tensor for tensor in given if not is_marked(tensor) and tensor.dim()]
            assert not strangers, f"{name} mixes devices: {[list(tensor.shape) for tensor in strangers]}"
        result = func(*args, **kwargs)
        if name == "copy_":
            return result
        return marked(result) if on_device else result

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        attribute = func.__self__.__name__
        if not is_marked(args[0]):
            return func(*args)
        if attribute in ("device", "is_cuda"):
            return CUDA if attribute == "device" else True
        return marked(func(*args))

    def _moved(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if name == "numpy":
            assert not is_marked(tensor), "a device tensor has no memory that numpy sees"
            return func(*args, **kwargs)
        goes_to = _HOST if name == "cpu" else CUDA if name == "cuda" else kwargs.pop("device", None)
        rest = []
        for arg in args[1:]:
            if isinstance(arg, str | torch.device):
                goes_to = torch.device(arg)
            else:
                rest.append(arg)
        on_device = is_marked(tensor) if goes_to is None else torch.device(goes_to).type == "cuda"
        result = tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        if on_device != is_marked(tensor):
            result = result.clone()
            result.__dict__.pop(_MARK, None)
        return marked(result) if on_device else result
