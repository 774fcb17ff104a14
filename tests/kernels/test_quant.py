import math

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


def test_fp8_values_are_those_of_the_library() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = codes[codes.isfinite()].sort().values
    between = ((values[1:] + values[:-1]) / 2)[values[1:] != 0]  # not zero, between the two zeros
    bits = between.view(torch.int32)
    x = torch.cat((values, between, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32), -between[-1:]))
    rows = torch.cat((x.view(-1, 1).repeat(1, 31), torch.full((len(x), 1), 448.0)), 1)  # the 448 makes the scale 1
    got = quant.fp8_qdq(rows)[:, 0]
    assert torch.equal(got.view(torch.int32), x.to(torch.float8_e4m3fn).float().view(torch.int32))


@pytest.mark.parametrize("name", ["fp8_g32", "fp4_e8m0_g32"])
def test_the_scale_of_any_mantissa_is_that_of_the_published_product(name: str) -> None:
    largest, part = (448, 1.37 * 2.0**-15) if name == "fp8_g32" else (6, 0.3)
    edge = torch.tensor(largest / 2.0 ** math.floor(math.log2(largest)))
    mantissas = (torch.arange(0, 1 << 23, 61, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    above, below = torch.nextafter(edge, 2 * edge), torch.nextafter(edge, edge / 2)
    top = torch.cat((mantissas, torch.stack((edge, above, below))))
    x = torch.zeros(len(top), 32)
    x[:, 0], x[:, 1] = top, top * part  # twice the scale would give another value
    scale = torch.exp2(torch.ceil(torch.log2((top * torch.tensor(1 / largest)).double()))).float().view(-1, 1)
    scaled = x[:, 1:2] / scale  # of FP4 less than 2, where its values are the halves
    want = scaled.to(torch.float8_e4m3fn).float() if largest == 448 else (2 * scaled).round() / 2
    assert torch.equal(FORMATS[name](x)[:, 1:2], want * scale)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_spoils_its_group_and_zeros_keep_their_sign(bad: float) -> None:
    x = torch.full((2, 64), -1e-30)
    x[0, 40], x[1, 0] = bad, -0.0
    got = quant.fp8_qdq(x)
    assert got[0, 32:].isnan().all()
    finite = torch.cat((got[0, :32], got[1]))
    assert finite.signbit().all() and not finite.any()


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
