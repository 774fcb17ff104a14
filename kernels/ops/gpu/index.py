"""Index scores over cached keys (spec §4.3); picks are torch's top-k of distinct integers, the same on any device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops.gpu.numbers import maybe_bf16, operand, power_of_two, rounds
from kernels.ops.gpu.pack import FORMS, dequantized
from kernels.ops.index import KEY_TILE, Cache
from kernels.ops.rounding import Rounding

_TILE = 64  # keys of one program


def scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Scores of one tile of keys, [rows, KEY_TILE, dim], each row its own."""
    rows = q.shape[0]
    cache = Cache(keys, torch.arange(rows, device=q.device))
    visible = torch.full((rows,), KEY_TILE, dtype=torch.int64, device=q.device)
    return cached_scores(q, weights, cache, visible, None, KEY_TILE, rounding)


def cached_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    visible: torch.Tensor,
    mask: torch.Tensor | None,
    num: int,
    rounding: Rounding,
) -> torch.Tensor:
    """Scores of the first `num` cached keys [rows, num], -inf where a key is not visible or no candidate."""
    rows, heads, dim = q.shape
    out = torch.empty(rows, num, dtype=torch.float32, device=q.device)
    record = cache.record
    if rows and num:
        index_scores_kernel[rows, triton.cdiv(num, _TILE)](
            q.contiguous(),
            weights.contiguous(),
            cache.keys,
            cache.slots,
            visible,
            None if mask is None else mask.contiguous().view(torch.uint8),
            out,
            cache.keys.stride(0),
            cache.keys.stride(1),
            num,
            DIM=dim,
            HEADS=heads,
            CODE_BYTES=record.code_bytes(dim) if record else 0,
            FORM=FORMS[record] if record else -1,
            GROUP=record.value[1] if record else 1,
            BF16=rounds(rounding),
            OPERAND=operand(True),
            TILE=_TILE,
            BLOCK=power_of_two(dim),
            HEAD_BLOCK=power_of_two(heads),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num"])
def index_scores_kernel(
    p_q, p_weights, p_keys, p_slots, p_visible, p_mask, p_out, slot_stride, key_stride, num,
    DIM: tl.constexpr, HEADS: tl.constexpr, CODE_BYTES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    BF16: tl.constexpr, OPERAND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
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
        slot = tl.load(p_slots + row).to(tl.int64)
        at = p_keys + slot * slot_stride + key.to(tl.int64)[:, None] * key_stride
        mask = wanted[:, None] & (value < DIM)
        if FORM < 0:
            keys = tl.load(at + value, mask=mask, other=0.0).to(tl.float32)
        else:
            keys = tl.where(mask, dequantized(at, value, mask, CODE_BYTES, FORM, GROUP), 0.0)
        dots = tl.dot(q, tl.trans(keys.to(OPERAND)), input_precision="ieee")  # [HEAD_BLOCK, TILE]
        dots = tl.maximum(maybe_bf16(dots, BF16), 0.0)
        total = tl.sum(maybe_bf16(dots * weights[:, None], BF16), 0)
        result = tl.where(wanted, maybe_bf16(total, BF16), result)
    tl.store(p_out + row * num + key, result, mask=key < num)
