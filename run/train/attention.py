"""Attention of a layer over whole batches: window, compressed rows, the indexer that picks them (spec §3, §4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.config import LayerRole, ModelConfig
from kernels.ops.quant import fp4_e4m3_qdq, fp4_e8m0_qdq, fp8_qdq
from run.train.layers import Turn, Weights, norm, product, rotate, straight_through

CHUNK = 64
"""Queries whose window keys are gathered together."""
NUM_GUIDED = 2
"""Heads of a guided layer that are to look where the next token stands."""
NEVER = -30000.0
"""Added to scores of what must not be seen: minus infinity for a softmax, and finite in BF16."""


@dataclass
class View:
    """What the queries of some layers may see; they are columns `start` to T of the batch's [B, T].

    `window` [B, chunks, CHUNK, 1, 3 CHUNK] is added to scores of the window; `lowest` [B, Q] is the first column of
    each query's conversation; `turn` and `local_turn` are their rotations with compressed rows and without;
    `sources` [B, Q] as in the batch.
    """

    start: int
    window: torch.Tensor
    lowest: torch.Tensor
    turn: Turn
    local_turn: Turn
    sources: torch.Tensor

    @property
    def num(self) -> int:
        return self.lowest.shape[1]


def window_bias(first: torch.Tensor, start: int, window: int) -> torch.Tensor:
    """Queries are columns `start`..T of a batch; `first` [B, Q] is the first column that each may see."""
    rows, num = first.shape
    query = torch.arange(num).view(-1, CHUNK, 1)
    key = query[:, :1] - window + torch.arange(CHUNK + window)
    lowest = torch.maximum(first.view(rows, -1, CHUNK, 1) - start, (query - window + 1).clamp(min=0))
    seen = (key >= lowest) & (key <= query)
    return torch.where(seen, 0.0, NEVER).unsqueeze(3)


@dataclass
class Global:
    """Compressed rows of a KV owner and what was picked of them. `rows` [B, S, head_dim], `keys` [B, S, index_dim]."""

    ratio: int
    rows: torch.Tensor
    keys: torch.Tensor
    bias: torch.Tensor | None = None  # [B, Q, S], added to scores: what is visible and picked
    candidates: torch.Tensor | None = None
    scores: torch.Tensor | None = None  # of the probed queries, with gradients: [B, probed, S]
    mass: list[torch.Tensor] = field(default_factory=list)  # attention of the probed queries, by layer
    missed: list[torch.Tensor] = field(default_factory=list)  # of guided layers, see `_missed`


def compress(x: torch.Tensor, w: Weights, name: str, role: LayerRole, config: ModelConfig, turn: Turn) -> Global:
    """Compressed rows and index keys of `x` [B, T, D], normed (spec §4.1, §4.2)."""
    latent = functional.linear(x, w[f"{name}.compressor.wkv.weight"]).float()
    if role.ratio == 2:
        shape = (x.shape[0], -1, 2, config.head_dim)
        share = functional.linear(x, w[f"{name}.compressor.wgate.weight"]).float().view(shape).softmax(2)
        latent = (share * latent.view(shape)).sum(2)
    latent = norm(latent, w[f"{name}.compressor.norm.weight"])
    first = Turn(turn.cos[:, :: role.ratio], turn.sin[:, :: role.ratio])
    keys = norm(functional.linear(latent.detach(), w[f"{name}.indexer.wk.weight"]), w[f"{name}.indexer.k_norm.weight"])
    keys = straight_through(rotate(keys.unsqueeze(2), first), fp4_e8m0_qdq).squeeze(2)
    rows = straight_through(rotate(latent.unsqueeze(2), first), fp4_e4m3_qdq).squeeze(2)
    return Global(role.ratio, rows, keys)


def visible(view: View, ratio: int, num: int) -> torch.Tensor:
    """Which of `num` compressed rows each query may see: [B, Q, num] bool."""
    column = torch.arange(num) * ratio
    query = view.start + torch.arange(view.num).unsqueeze(1)
    return (column >= view.lowest.unsqueeze(2)) & (column + ratio - 1 <= query)


def index_scores(
    qr: torch.Tensor, x: torch.Tensor, w: Weights, name: str, config: ModelConfig, turn: Turn, keys: torch.Tensor
) -> torch.Tensor:
    """Sum over heads of weight times relu(q . k) (spec §4.3): queries [B, Q], `keys` [B, S, dim] -> [B, Q, S] fp32."""
    heads, dim = config.index_n_heads, config.index_head_dim
    q = product(qr, w[f"{name}.indexer.wq_b.weight"]).unflatten(-1, (heads, dim))
    q = straight_through(rotate(q, turn), fp4_e8m0_qdq)
    weights = functional.linear(x, w[f"{name}.indexer.weights_proj.weight"]) * (dim * heads) ** -0.5
    dots = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).relu().unflatten(1, (-1, heads))
    total: torch.Tensor = torch.matmul(weights.unsqueeze(2).to(dots.dtype), dots)
    return total.squeeze(2).float()


def choose(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of what is `seen` [B, Q, S], as a mask; ties may let in more."""
    if scores.shape[-1] <= count:
        return seen
    held = scores.masked_fill(~seen, -torch.inf)
    least = held.topk(count, -1, sorted=True).values[..., -1:]
    return seen & (held >= least)


def candidates(scores: torch.Tensor, seen: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """The best blocks of `size` columns and the newest one of each query (spec §4.4), as a mask over columns."""
    num = scores.shape[-1]
    held = functional.pad(scores.masked_fill(~seen, -torch.inf), (0, -num % size), value=-torch.inf)
    best = held.unflatten(-1, (-1, size)).amax(-1)
    newest = seen.long().mul(torch.arange(num)).amax(-1, keepdim=True) // size
    best = best.scatter(-1, newest, torch.inf)
    if best.shape[-1] <= count:
        return seen
    least = best.topk(count, -1, sorted=True).values[..., -1:]
    among: torch.Tensor = (best >= least).repeat_interleave(size, -1)[..., :num]
    return seen & among


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    cached: Global | None,
    view: View,
    sink: torch.Tensor,
    probe: slice,
    *,
    guided: bool = False,
) -> torch.Tensor:
    """`q` [B, Q, H, dim] rotated, window rows `kv` [B, Q, dim], picked rows of `cached` -> [B, Q, H, dim].

    The queries are cut, so that early ones do not meet rows that come later; of those of `probe` it is kept where they
    attended. The result is not yet rotated back.
    """
    rows, num, heads, dim = q.shape
    chunks = kv.new_zeros(rows, 2, CHUNK, dim)
    blocks = torch.cat((chunks, kv.unflatten(1, (-1, CHUNK))), 1)
    near = torch.cat((blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]), 2)  # [B, chunks, 3 CHUNK, dim]
    q = q * dim**-0.5
    queries = q.unflatten(1, (-1, CHUNK)).flatten(2, 3)  # [B, chunks, CHUNK * heads, dim]
    to_window = torch.matmul(queries, near.transpose(2, 3)).unflatten(2, (CHUNK, heads))
    to_window = (to_window + view.window.to(to_window.dtype)).flatten(1, 2)  # [B, Q, H, 3 CHUNK]
    drain = sink.to(to_window.dtype).view(1, 1, heads, 1).expand(rows, num, heads, 1)
    size = near.shape[2]
    if cached is None:
        share = torch.cat((to_window, drain), -1).softmax(-1)[..., :size]
        return _gather(share, near)
    out = []
    for some in pieces(view, num):
        end = (view.start + some.stop) // cached.ratio
        keys = cached.rows[:, :end]
        far = torch.matmul(q[:, some].flatten(1, 2), keys.transpose(1, 2)).unflatten(1, (-1, heads))
        if cached.bias is not None:
            far = far + cached.bias[:, some, :end].unsqueeze(2).to(far.dtype)
        share = torch.cat((to_window[:, some], drain[:, some], far), -1).softmax(-1)
        sources = view.sources[:, some]
        if probe == some:
            mass = share[..., size + 1 :].detach().float().sum(2)
            if guided:  # the indexer is to pick them even where no head could look, as it had not picked them
                mass.scatter_add_(2, sources.clamp(min=0).unsqueeze(2), (sources >= 0).float().unsqueeze(2))
            cached.mass.append(functional.pad(mass, (0, cached.rows.shape[1] - end)))
        if guided:
            cached.missed.append(_missed(share[:, :, :NUM_GUIDED, size + 1 :], sources))
        part = slice(some.start // CHUNK, some.stop // CHUNK)
        from_rows = torch.matmul(share[..., size + 1 :].flatten(1, 2), keys.to(share.dtype)).unflatten(1, (-1, heads))
        out.append(_gather(share[..., :size], near[:, part]) + from_rows)
    return torch.cat(out, 1)


def _missed(share: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """-log of the `share` [B, Q, heads, columns] that is given to the `sources` [B, Q]: sum, and number of sources."""
    there = sources >= 0
    place = sources.clamp(min=0)[..., None, None].expand(*share.shape[:3], 1)
    given = share.gather(-1, place).squeeze(-1).float().mean(-1)
    return torch.stack((-(given + 1e-3).log()[there].sum(), there.sum()))


def pieces(view: View, num: int) -> list[slice]:
    """Cuts of `num` queries, for causal work."""
    count = 1 if view.start else max(1, min(8, num // 128))
    size = num // count
    return [slice(first, first + size) for first in range(0, num, size)]


def _gather(share: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """[B, Q, H, 3 CHUNK] of [B, chunks, 3 CHUNK, dim] -> [B, Q, H, dim]."""
    heads = share.shape[2]
    cut = share.unflatten(1, (-1, CHUNK)).flatten(2, 3)
    gathered: torch.Tensor = torch.matmul(cut, near.to(share.dtype)).unflatten(2, (CHUNK, heads))
    return gathered.flatten(1, 2)


def window_values(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotated window rows as the cache keeps them: `x` [B, Q, dim] -> the same."""
    return straight_through(rotate(x.unsqueeze(2), turn), fp8_qdq).squeeze(2)


class Projected(NamedTuple):
    """`low` [B, Q, q_lora_rank], normed; queries `q` [B, Q, H, dim] of it; `kv` [B, Q, dim], normed. Not rotated."""

    low: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor


def project(x: torch.Tensor, w: Weights, name: str, config: ModelConfig) -> Projected:
    """What a layer reads of `x` [B, Q, D], normed."""
    low = norm(product(x, w[f"{name}.wq_a.weight"]), w[f"{name}.q_norm.weight"])
    q = product(low, w[f"{name}.wq_b.weight"]).unflatten(-1, (config.num_attention_heads, config.head_dim))
    return Projected(low, q, norm(product(x, w[f"{name}.wkv.weight"]), w[f"{name}.kv_norm.weight"]))


def output(out: torch.Tensor, w: Weights, name: str, config: ModelConfig, turn: Turn) -> torch.Tensor:
    """Rotate back what was gathered [B, Q, H, dim], and project it in groups -> [B, Q, D]."""
    grouped = rotate(out, turn.back()).flatten(2).unflatten(-1, (config.o_groups, -1))
    wo_a = w[f"{name}.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
    low = torch.einsum("bqgk,gnk->bqgn", grouped, wo_a).flatten(2)
    return product(low, w[f"{name}.wo_b.weight"])
