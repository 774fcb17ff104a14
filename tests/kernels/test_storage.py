"""What is written is read back, and quantising what was read finds the same codes and scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kernels.checkpoint import Checkpoint
from kernels.ops.quant import dequantize_blocks, dequantize_fp4, dequantize_rows
from kernels.storage import encode, quantize_blocks, quantize_fp4, quantize_rows, save
from kernels.tensors import Format
from tests.kernels.conftest import golden

Pair = tuple[torch.Tensor, torch.Tensor]
ROUND_TRIPS: dict[Format, tuple[Callable[[torch.Tensor], Pair], Callable[..., torch.Tensor], float]] = {
    "fp8": (quantize_blocks, dequantize_blocks, 1 / 16),
    "table": (quantize_rows, dequantize_rows, 1 / 16),
    "fp4": (quantize_fp4, dequantize_fp4, 1 / 3),
}
forms = st.sampled_from(sorted(ROUND_TRIPS))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(
    form=forms,
    n=st.integers(1, 70),
    groups=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    size=st.integers(-100, 100),
    spread=st.integers(0, 30),
)
def test_quantising_what_was_read_changes_nothing(
    form: Format, n: int, groups: int, seed: int, size: int, spread: int
) -> None:
    quantize, dequantize, error = ROUND_TRIPS[form]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, 32 * groups, generator=generator)
    values = torch.ldexp(values, size + torch.randint(-spread, 1, values.shape, generator=generator))
    values[torch.rand(values.shape, generator=generator) < 0.1] = 0.0
    codes, scale = quantize(values)
    read = dequantize(codes, scale)
    again, scale_again = quantize(read)
    assert torch.equal(bits(again), bits(codes)) and torch.equal(bits(scale_again), bits(scale))
    # Half a step of a value's own binade, or of the smallest one.
    wide = scale.float().repeat_interleave(32, 1)
    if form == "fp8":
        wide = wide.repeat_interleave(32, 0)[:n]
    smallest = wide * (2.0**-10 if form != "fp4" else 0.25)
    assert bool(((read - values).abs() <= torch.maximum(values.abs() * error, smallest)).all())


@pytest.mark.parametrize("form", sorted(ROUND_TRIPS))
def test_every_code_survives(form: Format) -> None:
    quantize, dequantize, _ = ROUND_TRIPS[form]
    if form == "fp4":
        codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1).view(torch.int8)
        scale = torch.full((16, 16), 130, dtype=torch.uint8)
    else:
        numbers = torch.arange(256, dtype=torch.uint8)
        numbers[[0x7F, 0xFF]] = 0  # not numbers
        codes = numbers.view(8, 32).repeat(4, 1)
        codes[:, 0] = 0x7E  # the largest, so that the scale is the smallest possible
        codes = codes.view(torch.float8_e4m3fn)
        scale = torch.full((1 if form == "fp8" else 32, 1), 120, dtype=torch.uint8)
    e8m0 = scale.view(torch.float8_e8m0fnu)
    again, scale_again = quantize(dequantize(codes, e8m0))
    assert torch.equal(bits(again), bits(codes)) and torch.equal(bits(scale_again), scale)


def test_even_columns_are_in_the_low_half() -> None:
    row = torch.tensor([[0.5, -6.0] + [1.0, 3.0] * 15])  # codes 1, 15, then 2, 5
    packed, scale = quantize_fp4(row)
    assert bits(packed).tolist() == [[0xF1] + [0x52] * 15]
    assert bits(scale).tolist() == [[127]]
    assert torch.equal(dequantize_fp4(packed, scale), row)


def test_ties_go_to_the_even_code_and_the_largest_value_decides_the_scale() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    packed, scale = quantize_fp4(torch.tensor([[*ties, *(-tie for tie in ties)] * 2]))
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert dequantize_fp4(packed, scale).tolist() == [[*want, *(-value for value in want)] * 2]
    for quantize, reach, dim in ((quantize_fp4, 7.0, 32), (quantize_rows, 464.0, 32), (quantize_blocks, 464.0, 32)):
        for largest, exponent in ((reach, 0), (reach * 1.01, 1), (reach / 2, -1), (reach / 2 * 1.01, 0), (0.0, 0)):
            values = torch.zeros(32, dim)
            values[0, 3] = -largest
            assert bits(quantize(values)[1])[0, 0] == 127 + exponent
    with pytest.raises(ValueError, match="finite"):
        quantize_rows(torch.tensor([[torch.inf] * 32]))


@pytest.mark.oracle
def test_golden_weights_are_found_again() -> None:
    data = golden("units/gemm")
    for form, name in (("fp8", "fp8.weight"), ("fp4", "fp4.weight_i8")):
        quantize, dequantize, _ = ROUND_TRIPS[form]
        values = dequantize(data[name], data[name.split(".")[0] + ".scale"])
        assert torch.equal(dequantize(*quantize(values)), values)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made: dict[str, torch.Tensor] = {}
    for number, form in enumerate(("fp8", "fp4", "table", "bf16", "fp32")):
        values = torch.randn(40, 64, generator=generator)
        made |= encode(f"layers.{number}.{form}.weight", values, form)
    return made


@pytest.mark.parametrize("shard_bytes", [1 << 30, 4000, 1])
def test_files_hold_what_was_written(tmp_path: Path, shard_bytes: int) -> None:
    written = tensors()
    save(tmp_path, written.items(), shard_bytes)
    files = sorted(path.name for path in tmp_path.iterdir())
    found: dict[str, torch.Tensor] = {}
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(tmp_path / file, framework="pt") as shard:
                part = {name: shard.get_tensor(name) for name in shard.keys()}
            assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= shard_bytes
            found |= part
    assert found.keys() == written.keys()
    assert all(torch.equal(bits(found[name]), bits(written[name])) for name in written)
    assert all(found[name].dtype == written[name].dtype for name in written)
    if shard_bytes == 1 << 30:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
        assert len(files) == len(set(index["weight_map"].values())) + 1
        assert files[0].startswith("model-00001-of-0000")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.matrix("layers.0.fp8", 40, 64).quantized
    codes, scale = checkpoint.table("layers.2.table", 40, 64)
    assert torch.equal(bits(codes), bits(written["layers.2.table.weight"])) and scale.shape == (40, 2)


def test_a_single_file_replaces_shards_and_the_index_wins_over_a_file(tmp_path: Path) -> None:
    old, new = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    save(tmp_path, [*old.items(), ("b", torch.zeros(2))], 8)
    save(tmp_path, new.items())
    assert Checkpoint(tmp_path).tensor("a", 2).tolist() == [1, 1]
    assert "b" not in Checkpoint(tmp_path)
    save(tmp_path, [*old.items(), ("b", torch.zeros(2))], 8)
    assert Checkpoint(tmp_path).tensor("a", 2).tolist() == [0, 0]
