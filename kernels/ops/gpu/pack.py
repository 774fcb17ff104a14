"""Cache rows to records of bytes and back (spec §6)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import e2m1_value, e4m3_value, e8m0_value, power_of_two
from kernels.ops.gpu.quant import FP4_E4M3, FP4_E8M0, FP8, Codes, to_codes
from kernels.ops.pack import Record

FORMS = {Record.WINDOW: FP8, Record.INDEX: FP4_E8M0, Record.MAIN: FP4_E4M3}
_ROWS = 4  # records of one program


def pack(x: torch.Tensor, record: Record) -> torch.Tensor:
    """`x` [rows, dim] fp32, not yet quantised -> uint8 [rows, record.row_bytes(dim)]."""
    rows, dim = x.shape
    out = torch.empty(rows, record.row_bytes(dim), dtype=torch.uint8, device=x.device)
    code_bytes = record.code_bytes(dim)
    to_codes(x, FORMS[record], Codes(out[:, :code_bytes], out[:, code_bytes:]))
    return out


def gather(records: torch.Tensor, rows: torch.Tensor, record: Record) -> torch.Tensor:
    """Rows `rows` [num] int64 of `records` [all, row_bytes] -> fp32 [num, dim]; a row below zero gives zeros."""
    bits, group = record.value
    dim = records.shape[1] * 8 * group // (bits * group + 8)
    out = torch.empty(len(rows), dim, dtype=torch.float32, device=records.device)
    if len(rows):
        gather_kernel[triton.cdiv(len(rows), _ROWS),](
            records,
            rows,
            out,
            len(rows),
            records.stride(0),
            DIM=dim,
            CODE_BYTES=record.code_bytes(dim),
            FORM=FORMS[record],
            GROUP=group,
            ROWS=_ROWS,
            BLOCK=power_of_two(dim),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def window_rows(x: torch.Tensor) -> torch.Tensor:
    """WINDOW records of `x` [rows, dim] fp32: uint8 [rows, row_bytes]."""
    return pack(x, Record.WINDOW)


def window_values(kept: torch.Tensor) -> torch.Tensor:
    """The values [rows, dim] fp32 of WINDOW records [rows, row_bytes]."""
    return gather(kept, torch.arange(len(kept), device=kept.device), Record.WINDOW)


@triton.jit
def dequantized(p_record, value, mask, CODE_BYTES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Values number `value` of the records at `p_record`, which has the shape of `value` or is broadcast to it."""
    scale_code = tl.load(p_record + CODE_BYTES + value // GROUP, mask=mask, other=0)
    if FORM == 0:
        code = tl.load(p_record + value, mask=mask, other=0)
        return e4m3_value(code) * e8m0_value(scale_code)
    else:
        byte = tl.load(p_record + value // 2, mask=mask, other=0).to(tl.int32)
        code = e2m1_value((byte >> ((value & 1) * 4)) & 15)
        if FORM == 1:
            return code * e8m0_value(scale_code)
        else:
            return code * e4m3_value(scale_code)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    p_records, p_rows, p_out, num_rows, stride,
    DIM: tl.constexpr, CODE_BYTES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(p_rows + number, mask=number < num_rows, other=-1).to(tl.int64)
    value = tl.arange(0, BLOCK)[None, :]
    mask = (row >= 0)[:, None] & (value < DIM)
    out = dequantized(p_records + row[:, None] * stride, value, mask, CODE_BYTES, FORM, GROUP)
    kept = (number < num_rows)[:, None] & (value < DIM)
    tl.store(p_out + number.to(tl.int64)[:, None] * DIM + value, tl.where(mask, out, 0.0), mask=kept)
