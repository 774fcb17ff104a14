"""Parameters by official names: complete, written and read back as training saw them."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.tensors import model_tensors
from run.train.optimizer import Optimizer, _orthogonal
from run.train.parameters import as_stored, initial, read, stacked, stacked_name, write
from tests.run.train.models import loaded


def test_every_tensor_of_the_layout_has_its_parameter() -> None:
    known = stacked(loaded().config)
    for tensor in model_tensors(loaded().config):
        name, number = stacked_name(tensor.name)
        shape = known[name][0]
        assert shape == tensor.shape if number is None else shape[1:] == tensor.shape and number < shape[0]
    assert {name: tuple(value.shape) for name, value in initial(loaded().config, 1).items()} == {
        name: shape for name, (shape, _, _) in known.items()
    }


def test_a_loader_reads_what_training_computed_with(tmp_path: Path) -> None:
    config = loaded().config
    parameters = {name: value + 0.01 * torch.randn_like(value) for name, value in loaded().parameters.items()}
    write(tmp_path, parameters, config)
    found, want = read(tmp_path, config), as_stored(parameters, config)
    formats = stacked(config)
    assert found.keys() == want.keys()
    for name, value in found.items():
        kept = want[name].bfloat16().float() if formats[name][1] == "bf16" else want[name]
        assert torch.equal(value, kept), name


def test_a_seed_fixes_the_first_values() -> None:
    one, same, other = (initial(loaded().config, seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])


def test_fixed_parameters_and_those_of_balance_stay() -> None:
    parameters = {name: value.clone() for name, value in loaded().parameters.items()}
    optimizer = Optimizer(parameters, loaded().config, frozenset({"embed.weight"}))
    for value in parameters.values():
        value.grad = torch.ones_like(value)
    optimizer.step(1.0)
    still = {name for name, value in parameters.items() if torch.equal(value, loaded().parameters[name])}
    assert still == {"embed.weight", *(name for name in parameters if ".gate.bias" in name)}


def test_steps_of_matrices_are_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((3, 64, 16), (16, 64)):
        sizes = torch.linalg.svdvals(_orthogonal(torch.randn(shape)) / max(1, shape[-2] / shape[-1]) ** 0.5)
        assert 0.6 < float(sizes.min()) and float(sizes.max()) < 1.3
