"""Cache rows as bytes: one record of codes, then scales, per row; it keeps all that quantising kept (spec §6)."""

from __future__ import annotations

from enum import Enum

import torch

from kernels.ops.dispatch import by_device
from kernels.ops.quant import E2M1_PAIRS, fp8_qdq
from kernels.ops.rounding import scalar

_CODE_OF_TWICE = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)
_EXPONENT, _SIGN = torch.tensor(0x7F800000, dtype=torch.int32), torch.tensor(8, dtype=torch.uint8)
_BYTES = torch.arange(256, dtype=torch.uint8)
_E4M3 = _BYTES.view(torch.float8_e4m3fn).to(torch.float32)
_E8M0 = _BYTES.view(torch.float8_e8m0fnu).to(torch.float32)


class Record(Enum):
    """What a row of a cache is stored as: (bits of a code, values per scale)."""

    WINDOW = (8, 32)  # E4M3, E8M0 scales: 528 bytes for 512 values
    MAIN = (4, 16)  # E2M1, E4M3 scales: 288 bytes for 512 values
    INDEX = (4, 32)  # E2M1, E8M0 scales: 68 bytes for 128 values

    def code_bytes(self, dim: int) -> int:
        return dim * self.value[0] // 8

    def row_bytes(self, dim: int) -> int:
        return self.code_bytes(dim) + dim // self.value[1]


@by_device
def pack(x: torch.Tensor, record: Record) -> torch.Tensor:
    """`x` [rows, dim] fp32, not yet quantised -> uint8 [rows, record.row_bytes(dim)].

    What `gather` gives back is bit for bit what the quantise-dequantise function of that format makes of `x`.
    """
    bits, group = record.value
    rows, dim = x.shape
    groups = x.reshape(rows, dim // group, group)
    amax = groups.abs().amax(-1)
    if record is Record.MAIN:
        scale = (amax.clamp_(min=6 * 2.0**-9) / 6).clamp_(max=448).to(torch.float8_e4m3fn)
        scale_codes = scale.view(torch.uint8)
    else:
        least, reciprocal = (1e-4, 1 / 448) if record is Record.WINDOW else (6 * 2.0**-126, 1 / 6)
        above = amax.clamp_(min=least).mul_(torch.tensor(reciprocal)).view(torch.int32).add(0x007FFFFF)
        scale_codes = (above >> 23).to(torch.uint8)
        scale = scale_codes.view(torch.float8_e8m0fnu)
    scaled = groups / scale.to(torch.float32).unsqueeze(-1)
    if bits == 8:
        codes = scaled.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    else:
        codes = _pairs(_e2m1_codes(scaled).flatten(1))
    return torch.cat((codes, scale_codes), 1)


@by_device
def gather(records: torch.Tensor, rows: torch.Tensor, record: Record) -> torch.Tensor:
    """Rows `rows` [num] int64 of `records` [all, row_bytes] -> fp32 [num, dim]; a row below zero gives zeros."""
    values = unpack(records.index_select(0, rows.clamp(min=0)), record)
    return torch.where((rows >= 0).unsqueeze(1), values, 0.0)


@by_device
def window_rows(x: torch.Tensor) -> torch.Tensor:
    """What a sliding window keeps of `x` [rows, dim] fp32, not yet quantised: here quantised values, which a CPU reads
    without unpacking them, on a GPU WINDOW records. Doing it to what `window_values` gave loses nothing."""
    return fp8_qdq(x)


@by_device
def window_values(kept: torch.Tensor) -> torch.Tensor:
    """The values [rows, dim] fp32 of what `window_rows` gave."""
    return kept


def unpack(records: torch.Tensor, record: Record) -> torch.Tensor:
    """All of `records` [num, row_bytes] on a CPU -> fp32 [num, dim], by tables: a tenth of the time of arithmetic."""
    bits, group = record.value
    num, row_bytes = records.shape
    dim = row_bytes * 8 * group // (bits * group + 8)
    numbers = records.to(torch.int32)
    codes, scales = numbers.split_with_sizes((record.code_bytes(dim), dim // group), 1)
    if bits == 8:
        values = _E4M3.index_select(0, codes.reshape(-1))
    else:
        values = torch.view_as_real(E2M1_PAIRS.index_select(0, codes.reshape(-1)))
    scale = (_E4M3 if record is Record.MAIN else _E8M0).index_select(0, scales.reshape(-1))
    return values.view(num, dim // group, group).mul_(scale.view(num, dim // group, 1)).view(num, dim)


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """The code of the nearest E2M1 value, ties to the even code, saturating: [...] fp32 -> uint8; of NaN, for which
    there is none, that of some value."""
    size = x.abs().clamp_(max=6.0)
    step = size.clamp(min=1.0).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32).mul_(scalar(0.5))
    twice = size.div_(step).round_().mul_(step).mul_(scalar(2.0)).to(torch.int32)
    twice.bitwise_and_(15)  # changes only what became of NaN: an index for which there is no code
    codes = _CODE_OF_TWICE.index_select(0, twice.view(-1)).view(x.shape)
    return codes.add_(x.signbit().view(torch.uint8).mul_(_SIGN))


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes [rows, dim] -> bytes [rows, dim / 2], the even one in the low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)
