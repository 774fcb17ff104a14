"""The golden data and the model that must reproduce it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.cache import StatePool
from kernels.model import Model, load_model

GOLDEN = Path(__file__).parent.parent / "data" / "oracle"


def golden(name: str) -> dict[str, torch.Tensor]:
    """Tensors of `mini/NAME` or `units/NAME`."""
    return load_file(GOLDEN / f"{name}.safetensors")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slower on two threads than on one; tests that want two say so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def mini() -> Model:
    return load_model(GOLDEN / "mini")


@pytest.fixture(scope="session")
def mini_bf16() -> Model:
    return load_model(GOLDEN / "mini", compute_dtype="bf16")


@pytest.fixture
def pool(mini: Model) -> StatePool:
    return StatePool(mini.config, num_slots=6, max_tokens=256)
