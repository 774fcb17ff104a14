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
