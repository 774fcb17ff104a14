"""Kernels without a GPU: interpreted, into memory that holds NaN before they write."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from run.bench.gpu_case import mapped

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton, which decides there


def poison(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 85)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write shows."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(empty_like(*args, **kwargs)))


def fresh(args: Any) -> Any:
    """A copy: some operations write into their arguments."""
    return mapped(args, torch.Tensor.clone)
