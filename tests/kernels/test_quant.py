import pytest
import torch

from kernels.ops import quant
from tests.kernels.conftest import golden

FORMATS = {
    "fp8_g32": quant.fp8_qdq,
    "fp4_e8m0_g32": quant.fp4_e8m0_qdq,
    "fp4_e4m3_g16": quant.fp4_e4m3_qdq,
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", FORMATS)
def test_quantise_dequantise_is_exact(name: str) -> None:
    data = golden("units/quantizers")
    once = FORMATS[name](data["x"].float()).bfloat16()
    assert torch.equal(once, data[f"{name}.qdq"])
    twice = FORMATS[name](once.float()).bfloat16()
    torch.testing.assert_close(twice, data[f"{name}.qdq_twice"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_input_is_left_alone_and_strides_do_not_matter(name: str) -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    want = FORMATS[name](x)
    assert torch.equal(x, kept)
    assert torch.equal(FORMATS[name](x.transpose(0, 1)), want.transpose(0, 1))


def test_fp4_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    row = torch.cat((ties, -ties)).repeat(2)  # the 6 makes the scale 1
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(quant.fp4_e8m0_qdq(row), torch.cat((want, -want)).repeat(2))


def test_table_rows_are_scaled_per_32_columns() -> None:
    codes = torch.full((2, 64), 1.5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 0.5]]).to(torch.float8_e8m0fnu)
    rows = quant.dequantize_rows(codes, scale)
    assert rows[0, 31] == 1.5 and rows[0, 32] == 3.0 and rows[1, 0] == 6.0 and rows[1, 63] == 0.75
