from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kernels.checkpoint import Checkpoint, Weight
from kernels.ops.quant import dequantize_blocks, dequantize_fp4
from kernels.projection import Projection
from tests.kernels.conftest import golden


@pytest.mark.oracle
def test_stored_weights_are_read_exactly() -> None:
    data = golden("units/gemm")
    assert torch.equal(dequantize_blocks(data["fp8.weight"], data["fp8.scale"]), data["fp8.weight_dequant"])
    assert torch.equal(dequantize_fp4(data["fp4.weight_i8"], data["fp4.scale"]), data["fp4.weight_dequant"])
    every_byte = torch.arange(256, dtype=torch.uint8).view(16, 16)
    ones = torch.ones(16, 1).to(torch.float8_e8m0fnu)
    assert torch.equal(dequantize_fp4(every_byte, ones).view(256, 2), data["fp4.byte_table"])


@pytest.mark.oracle
def test_products_of_quantised_weights(tmp_path: Path) -> None:
    data = golden("units/gemm")
    tensors = {
        "a.weight": data["fp8.weight"],
        "a.scale": data["fp8.scale"],
        "b.weight": data["fp4.weight_i8"],
        "b.scale": data["fp4.scale"],
        "c.weight": torch.randn(8, 96).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    parts = [checkpoint.matrix("a", 40, 96), checkpoint.matrix("b", 40, 96), checkpoint.matrix("c", 8, 96)]
    x = data["x"].float()
    fp8, fp4, plain = Projection(*parts).forward(x)
    torch.testing.assert_close(fp8, data["fp8.y_fp32"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fp4, data["fp4.y_fp32"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, x @ tensors["c.weight"].float().T, rtol=1e-5, atol=1e-5)


def test_quantised_parts_come_first() -> None:
    with pytest.raises(ValueError, match="first"):
        Projection(Weight(torch.ones(4, 32), quantized=False), Weight(torch.ones(4, 32), quantized=True))
