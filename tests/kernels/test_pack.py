from collections.abc import Callable

import pytest
import torch

from kernels.ops import quant
from kernels.ops.pack import Record, gather, pack

PAIRS = [(Record.WINDOW, quant.fp8_qdq), (Record.MAIN, quant.fp4_e4m3_qdq), (Record.INDEX, quant.fp4_e8m0_qdq)]


def test_sizes_are_the_published_ones() -> None:
    assert Record.WINDOW.row_bytes(512) == 528
    assert Record.MAIN.row_bytes(512) == 288
    assert Record.INDEX.row_bytes(128) == 68


@pytest.mark.parametrize(("record", "quantize"), PAIRS)
def test_packing_keeps_every_bit_that_quantising_keeps(
    record: Record, quantize: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 96, generator=generator) * torch.randn(50, 1, generator=generator).mul_(4).exp_()
    x[3] = 0.0
    x[4, ::2] = -0.0
    records = pack(x, record)
    assert records.shape == (50, record.row_bytes(96))
    rows = torch.tensor([49, -1, 3, 3, 4, 0])
    got = gather(records, rows, record)
    want = torch.where((rows >= 0)[:, None], quantize(x)[rows], 0.0)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_the_even_value_is_in_the_low_half() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 1.0, -6.0, 0.5
    records = pack(x, Record.INDEX)
    assert records[0, :2].tolist() == [0xF2, 0x01]
    assert records[0, 16] == 127


@pytest.mark.parametrize("record", list(Record))
def test_every_byte_means_what_the_formats_say(record: Record) -> None:
    bits, group = record.value
    codes, scales = torch.arange(256).repeat_interleave(256), torch.arange(256).repeat(256)
    scale_type = torch.float8_e4m3fn if record is Record.MAIN else torch.float8_e8m0fnu
    factor = scales.to(torch.uint8).view(scale_type).float().unsqueeze(1)
    if bits == 8:
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float().unsqueeze(1)
    else:
        size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nibbles = torch.stack((codes & 15, codes >> 4), 1)
        values = torch.where(nibbles > 7, -size[nibbles & 7], size[nibbles & 7])
    records = torch.zeros(len(codes), record.row_bytes(group), dtype=torch.uint8)
    records[:, 0], records[:, -1] = codes.to(torch.uint8), scales.to(torch.uint8)
    got = gather(records, torch.arange(len(codes)), record)[:, : values.shape[1]]
    torch.testing.assert_close(got, values * factor, rtol=0, atol=0, equal_nan=True)


def test_window_rows_survive_packing_as_values() -> None:
    """Rings hold values, exported state holds records: nothing may be lost on the way, at any size and code."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.arange(-30, 30).repeat_interleave(200).unsqueeze(1)
    x = torch.randn(len(exponents), 64, generator=generator) * exponents.float().exp2()
    x[::3, 0] = exponents[::3, 0].float().exp2() * 224  # on the edge between two scales
    values = quant.fp8_qdq(x)
    again = gather(pack(values, Record.WINDOW), torch.arange(len(x)), Record.WINDOW)
    assert torch.equal(again.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(("record", "quantize"), PAIRS)
def test_no_rows_pack_to_no_rows(record: Record, quantize: Callable[[torch.Tensor], torch.Tensor]) -> None:
    records = pack(torch.empty(0, 96), record)
    assert records.shape == (0, record.row_bytes(96))
    assert gather(records, torch.empty(0, dtype=torch.int64), record).shape == (0, 96)


@pytest.mark.parametrize("record", Record)
def test_what_is_not_a_number_spoils_its_own_row_only(record: Record) -> None:
    x = torch.full((3, 96), 6.0)
    x[1, 40] = torch.nan
    values = gather(pack(x, record), torch.arange(3), record)
    assert torch.equal(values[[0, 2]], x[[0, 2]])
    if record is not Record.INDEX:  # of E2M1 and E8M0: a number, and its main row tells
        assert values[1].isnan().any()
