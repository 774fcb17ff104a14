"""Index scores over cached keys (spec §4.3); picks are torch's top-k of distinct integers, the same on any device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import maybe_bf16, operand, power_of_two, rounds
from kernels.ops.gpu.pack import FORMS, dequantized
from kernels.ops.index import Cache
from kernels.ops.pack import Record
from kernels.ops.rounding import Rounding

_TILE = 64  # keys of one program

_LOW = 0xFFFFFFFF
_NONE = 1 << 30  # sorts behind every row number


def top_rows(values: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best visible columns of each row, ascending, -1 behind them: [rows, count] int64."""
    picked = best_columns(values, min(count, values.shape[1]))
    picked = torch.where(picked < visible.unsqueeze(1), picked, _NONE).sort(-1).values
    if picked.shape[1] < count:
        picked = torch.nn.functional.pad(picked, (0, count - picked.shape[1]), value=_NONE)
    return torch.where(picked < _NONE, picked, -1)


def best_columns(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` greatest values, in no order; ties go to the lower column."""
    bits = values.add(0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ordered.to(torch.int64) << 32) | (_LOW - torch.arange(values.shape[1], device=values.device))
    return _LOW - (packed.topk(count, -1, sorted=False).values & _LOW)


def cached_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    visible: torch.Tensor,
    mask: torch.Tensor | None,
    rounding: Rounding,
) -> torch.Tensor:
    """Scores of all keys of a row's request [rows, cache.num], -inf where a key is not visible or no candidate."""
    rows, heads, dim = q.shape
    num, record = cache.num, Record.INDEX
    out = torch.empty(rows, num, dtype=torch.float32, device=q.device)
    if rows:
        index_scores_kernel[rows, triton.cdiv(num, _TILE)](
            q.contiguous(),
            weights.contiguous(),
            cache.pages,
            cache.tables,
            visible,
            None if mask is None else mask.contiguous().view(torch.uint8),
            out,
            cache.tables.stride(0),
            rows // len(cache.tables),
            num,
            DIM=dim,
            HEADS=heads,
            PER_BLOCK=cache.pages.shape[1],
            ROW_BYTES=record.row_bytes(dim),
            CODE_BYTES=record.code_bytes(dim),
            FORM=FORMS[record],
            GROUP=record.value[1],
            BF16=rounds(rounding),
            OPERAND=operand(True),
            TILE=_TILE,
            BLOCK=power_of_two(dim),
            HEAD_BLOCK=power_of_two(heads),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num", "table_stride", "length"])
def index_scores_kernel(
    p_q, p_weights, p_pages, p_tables, p_visible, p_mask, p_out, table_stride, length, num,
    DIM: tl.constexpr, HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, ROW_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, BF16: tl.constexpr, OPERAND: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and TILE keys; a tile of which nothing may be picked is not read."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = (key < num) & (key < tl.load(p_visible + row))
    if p_mask is not None:
        wanted = wanted & (tl.load(p_mask + row * num + key, mask=wanted, other=0) != 0)
    result = tl.full([TILE], -float("inf"), tl.float32)
    if tl.max(wanted.to(tl.int32), 0) > 0:
        head = tl.arange(0, HEAD_BLOCK)
        value = tl.arange(0, BLOCK)[None, :]
        q_mask = (head < HEADS)[:, None] & (value < DIM)
        q = tl.load(p_q + (row * HEADS + head)[:, None] * DIM + value, mask=q_mask, other=0.0).to(OPERAND)
        weights = tl.load(p_weights + row * HEADS + head, mask=head < HEADS, other=0.0)
        table = p_tables + row // length * table_stride
        page = tl.load(table + key // PER_BLOCK, mask=wanted, other=0).to(tl.int64)
        at = p_pages + (page * PER_BLOCK + key % PER_BLOCK)[:, None] * ROW_BYTES
        mask = wanted[:, None] & (value < DIM)
        keys = tl.where(mask, dequantized(at, value, mask, CODE_BYTES, FORM, GROUP), 0.0)
        dots = tl.dot(q, tl.trans(keys.to(OPERAND)), input_precision="ieee")  # [HEAD_BLOCK, TILE]
        dots = tl.maximum(maybe_bf16(dots, BF16), 0.0)
        total = tl.sum(maybe_bf16(dots * weights[:, None], BF16), 0)
        result = tl.where(wanted, maybe_bf16(total, BF16), result)
    tl.store(p_out + row * num + key, result, mask=key < num)
