import pytest
import torch

from kernels.config import RopeScaling
from kernels.model import Model
from kernels.ops.rope import Rotation, frequencies, rotate_
from kernels.ops.rounding import to_bf16
from tests.kernels.conftest import golden

FULL = RopeScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "theta", "scaling"), [("full.swa_theta10000", 1e4, None), ("full.csa_theta160000_yarn", 1.6e5, FULL)]
)
def test_full_size_tables(name: str, theta: float, scaling: RopeScaling | None) -> None:
    data = golden("units/rope")
    freqs = frequencies(64, theta, scaling)
    torch.testing.assert_close(freqs.double(), data[f"{name}.freq"], rtol=1e-6, atol=0)
    rotation = Rotation.at(data["full.positions"], freqs)
    torch.testing.assert_close(rotation.cos[:, 0, ::2], data[f"{name}.cos"], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.sin[:, 0, 1::2], data[f"{name}.sin"], rtol=0, atol=1e-6)


@pytest.mark.oracle
def test_rotation_and_its_inverse(mini: Model) -> None:
    data = golden("units/rope")
    rotation = Rotation.at(torch.arange(20, 32), mini.compressed_freqs)
    rotated = to_bf16(rotate_(data["apply.x"].float(), rotation))
    assert torch.equal(rotated, data["apply.y_csa_pos20_31"].float())
    assert torch.equal(to_bf16(rotate_(rotated, rotation.inverse)), data["apply.inverse_of_y"].float())


def test_only_the_last_dims_turn(mini: Model) -> None:
    x = torch.randn(2, 3, 64)
    before = x.clone()
    rotate_(x, Rotation.at(torch.tensor([0, 7]), mini.window_freqs))
    assert torch.equal(x[0], before[0]) and torch.equal(x[1, :, :32], before[1, :, :32])
    assert not torch.equal(x[1, :, 32:], before[1, :, 32:])
