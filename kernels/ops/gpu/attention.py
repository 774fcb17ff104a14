"""Attention over the cache rows that each query names, with a sink and the inverse rotation (spec §3).

One program per query and 16 heads; keys in tiles of fixed size, window first, with a running maximum that starts at
-1e30. Neither the tiles nor their order depend on the batch, and a tile without a key changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.ops.attention import Keys, KeySet, Source, Window
from kernels.ops.gpu.numbers import maybe_bf16, operand, power_of_two, rounds
from kernels.ops.gpu.pack import FORMS, dequantized
from kernels.ops.pack import Record
from kernels.ops.rope import Rotation
from kernels.ops.rounding import Rounding

_HEADS = 16  # the smallest side of a product
_TILE, _FP32_TILE = 32, 16  # keys of one product: with 512 values each they fill 32 KB of shared memory


def sliding(run: torch.Tensor, window: Window) -> Keys:
    """The keys of each row: `run` uint8 [num, size - 1 + length, row_bytes], WINDOW records, named, not copied."""
    return Keys(run.flatten(0, 1), window.named, Record.WINDOW)


def picked(pages: torch.Tensor, tables: torch.Tensor, picks: torch.Tensor) -> Keys:
    """The compressed rows `picks` [rows, num] of requests whose blocks are `tables` [requests, n], named."""
    per_block, at = pages.shape[1], picks.clamp(min=0).view(len(tables), -1)
    blocks = tables.gather(1, at.div(per_block, rounding_mode="floor"))
    rows = (blocks * per_block + at % per_block).view(picks.shape)
    return Keys(pages.flatten(0, 1), torch.where(picks < 0, -1, rows), Record.MAIN)


def sparse_attend(
    q: torch.Tensor,
    window: Source,
    picks: Source,
    sink: torch.Tensor,
    scale: float,
    rotation: Rotation,
    rounding: Rounding,
) -> torch.Tensor:
    """`q` [rows, heads, dim] fp32 over two sources -> [rows, heads, dim], rotated back, rounded."""
    first, second = (source if isinstance(source, Keys) else _joined(source) for source in (window, picks))
    if first is None:
        first, second = second, None
    if first is None:
        raise ValueError("attention needs keys")
    return _launch(q, first, second, sink, scale, rotation, rounding)


def _launch(
    q: torch.Tensor,
    window: Keys,
    picked: Keys | None,
    sink: torch.Tensor,
    scale: float,
    rotation: Rotation,
    rounding: Rounding,
) -> torch.Tensor:
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
    second = picked or window
    rounded = rounds(rounding)
    if rows:
        sparse_attend_kernel[rows, triton.cdiv(heads, _HEADS)](
            q.contiguous(),
            window.cache,
            window.named.contiguous(),
            second.cache,
            second.named.contiguous(),
            sink,
            rotation.cos,
            rotation.sin,
            out,
            window.named.shape[1],
            picked.named.shape[1] if picked else 0,
            window.cache.stride(0),
            second.cache.stride(0),
            heads,
            scale,
            DIM=dim,
            ROPE=rotation.cos.shape[-1],
            WINDOW_BYTES=_code_bytes(window, dim),
            WINDOW_FORM=_form(window),
            WINDOW_GROUP=_group(window),
            PICKED_BYTES=_code_bytes(second, dim),
            PICKED_FORM=_form(second),
            PICKED_GROUP=_group(second),
            BF16=rounded,
            OPERAND=operand(rounded),
            HEADS=_HEADS,
            TILE=_TILE if rounded else _FP32_TILE,
            BLOCK=power_of_two(dim),
            num_warps=8,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


def _joined(source: KeySet | Sequence[KeySet]) -> Keys | None:
    """Gathered keys as named rows of one array; None when there are none."""
    key_sets = [source] if isinstance(source, KeySet) else source
    if not key_sets:
        return None
    keys = torch.cat([keys.flatten(0, 1) if keys.dim() == 4 else keys for keys, _ in key_sets], 1)
    bias = torch.cat([bias for _, bias in key_sets], 1)
    number = torch.arange(bias.numel(), device=bias.device).view(bias.shape)
    return Keys(keys.flatten(0, 1), torch.where(bias == 0, number, -1))


def _form(keys: Keys) -> int:
    return -1 if keys.record is None else FORMS[keys.record]


def _code_bytes(keys: Keys, dim: int) -> int:
    return 0 if keys.record is None else keys.record.code_bytes(dim)


def _group(keys: Keys) -> int:
    return (keys.record or Record.WINDOW).value[1]


@triton.jit
def add_keys(
    q, top, total, out, p_cache, p_index, num_keys, stride, scale,
    DIM: tl.constexpr, CODE_BYTES: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, BF16: tl.constexpr,
    OPERAND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the keys that `p_index` names to the running maximum [heads], denominator [heads] and sum [heads, BLOCK]."""
    value = tl.arange(0, BLOCK)[None, :]
    for start in range(0, num_keys, TILE):
        number = start + tl.arange(0, TILE)
        row = tl.load(p_index + number, mask=number < num_keys, other=-1).to(tl.int64)
        if tl.max(row, 0) >= 0:
            mask = (row >= 0)[:, None] & (value < DIM)
            at = p_cache + row[:, None] * stride
            if FORM < 0:
                keys = tl.load(at + value, mask=mask, other=0.0).to(tl.float32)
            else:
                keys = tl.where(mask, dequantized(at, value, mask, CODE_BYTES, FORM, GROUP), 0.0)
            keys = keys.to(OPERAND)  # [TILE, BLOCK]
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where((row >= 0)[None, :], scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            part = tl.dot(maybe_bf16(weights, BF16).to(OPERAND), keys, input_precision="ieee")
            out = out * shrink[:, None] + part
            top = higher
    return top, total, out


@triton.jit(do_not_specialize=["num_window", "num_picked"])
def sparse_attend_kernel(
    p_q, p_window, p_window_index, p_picked, p_picked_index, p_sink, p_cos, p_sin, p_out,
    num_window, num_picked, window_stride, picked_stride, num_heads, scale,
    DIM: tl.constexpr, ROPE: tl.constexpr, WINDOW_BYTES: tl.constexpr, WINDOW_FORM: tl.constexpr,
    WINDOW_GROUP: tl.constexpr, PICKED_BYTES: tl.constexpr, PICKED_FORM: tl.constexpr, PICKED_GROUP: tl.constexpr,
    BF16: tl.constexpr, OPERAND: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    value = tl.arange(0, BLOCK)[None, :]
    base = (row * num_heads + head.to(tl.int64))[:, None] * DIM
    there = (head < num_heads)[:, None]
    q = tl.load(p_q + base + value, mask=there & (value < DIM), other=0.0).to(OPERAND)
    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, BLOCK], tl.float32)
    top, total, out = add_keys(
        q, top, total, out, p_window, p_window_index + row * num_window, num_window, window_stride, scale,
        DIM, WINDOW_BYTES, WINDOW_FORM, WINDOW_GROUP, BF16, OPERAND, TILE, BLOCK,
    )  # fmt: skip
    top, total, out = add_keys(
        q, top, total, out, p_picked, p_picked_index + row * num_picked, num_picked, picked_stride, scale,
        DIM, PICKED_BYTES, PICKED_FORM, PICKED_GROUP, BF16, OPERAND, TILE, BLOCK,
    )  # fmt: skip
    sink = tl.load(p_sink + head, mask=head < num_heads, other=0.0)
    total += tl.exp(tl.minimum(sink - top, 88.0))  # without keys `top` is -1e30: still zeros, without infinities
    out = maybe_bf16(out / total[:, None], BF16)

    even, odd = tl.split(tl.reshape(out, (HEADS, BLOCK // 2, 2)))
    even_at = 2 * tl.arange(0, BLOCK // 2)[None, :]
    angle = even_at - (DIM - ROPE)
    turned = (angle >= 0) & (even_at < DIM)
    cos = tl.load(p_cos + row * ROPE + angle, mask=turned, other=1.0)
    sin = tl.load(p_sin + row * ROPE + angle + 1, mask=turned, other=0.0)
    new_even = maybe_bf16(tl.where(turned, even * cos + odd * sin, even), BF16)
    odd = maybe_bf16(tl.where(turned, odd * cos - even * sin, odd), BF16)
    even = new_even
    tl.store(p_out + base + even_at, even, mask=there & (even_at < DIM))
    tl.store(p_out + base + even_at + 1, odd, mask=there & (even_at < DIM))
