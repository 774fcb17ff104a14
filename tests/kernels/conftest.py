"""The golden data and the model that must reproduce it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.cache import StatePool
from kernels.model import Model, load_model
from kernels.ops.pack import Record, gather
from tests.conftest import Run
from tests.oracle.sums import exact_sums

GOLDEN = Path(__file__).parent.parent / "data" / "oracle"


def golden(name: str) -> dict[str, torch.Tensor]:
    """Tensors of `mini/NAME` or `units/NAME`."""
    return load_file(GOLDEN / f"{name}.safetensors")


def unpacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An exported state with the values that its records stand for."""
    forms = {"swa": Record.WINDOW, "draft_swa": Record.WINDOW, "main": Record.MAIN, "index_k": Record.INDEX}
    values = dict(state)
    for name, array in state.items():
        if record := forms.get(name.partition(".")[0]):
            flat = array.flatten(0, -2)
            values[name] = gather(flat, torch.arange(len(flat)), record).view(*array.shape[:-1], -1)
    return values


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slower on two threads than on one; tests that want two say so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_debug() -> Iterator[Run]:
    """Run a coroutine on one loop only, where the time goes into arithmetic and not into the loop."""
    with asyncio.Runner(debug=True) as runner:
        yield runner.run


@pytest.fixture(scope="session")
def mini() -> Model:
    return load_model(GOLDEN / "mini")


@pytest.fixture(scope="session")
def mini_bf16() -> Model:
    return load_model(GOLDEN / "mini", compute_dtype="bf16")


@pytest.fixture
def pool(mini: Model) -> StatePool:
    return StatePool(mini.config, num_slots=6, max_tokens=256)


@pytest.fixture
def sums() -> Iterator[None]:
    """Golden runs of many tokens: in FP32 a value at a rounding boundary falls on either side, by processor."""
    with exact_sums():
        yield
