"""The parts of a layer with gradients: what `kernels/` computes row by row, here over whole batches at once.

Shapes: B rows of T tokens; C streams; D the hidden size. Products may run in BF16 under autocast; sums are FP32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kernels.ops.quant import fp8_qdq

Weights = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], torch.Tensor]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantize: Quantize) -> torch.Tensor:
        return quantize(x.detach().float().clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def straight_through(x: torch.Tensor, quantize: Quantize) -> torch.Tensor:
    """`quantize(x)`, fp32, whose gradient is that of `x`."""
    out: torch.Tensor = _StraightThrough.apply(x, quantize)
    return out


_rounds = False
_TURNS = 16


@contextlib.contextmanager
def rounded_inputs() -> Iterator[None]:
    """Within, products with quantised weights read FP8, as serving does. A step takes 6 to 8 % longer."""
    global _rounds
    before, _rounds = _rounds, True
    try:
        yield
    finally:
        _rounds = before


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [.., k] times a matrix [n, k] that is stored quantised -> [.., n]."""
    return functional.linear(straight_through(x, fp8_qdq) if _rounds else x, weight)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last axis (spec §2.2), fp32."""
    return functional.rms_norm(x.float(), weight.shape, weight, 1e-20)


class Turn(NamedTuple):
    """Cosines and sines [B, T, 1, pairs] of the positions of a batch."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, freqs: torch.Tensor) -> Turn:
        angles = positions.float().unsqueeze(-1).unsqueeze(-1) * freqs
        return cls(angles.cos(), angles.sin())

    def back(self) -> Turn:
        return Turn(self.cos, -self.sin)


def rotate(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotary positions on the last dims of `x` [B, T, heads, dim], adjacent pairs (spec §3.1)."""
    size = 2 * turn.cos.shape[-1]
    still, tail = x[..., :-size].float(), x[..., -size:].float()
    a, b = tail[..., ::2], tail[..., 1::2]
    turned = torch.stack((a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin), -1)
    return torch.cat((still, turned.flatten(-2)), -1)


class _Sinkhorn(torch.autograd.Function):
    """Softmax over j, then alternate divisions by the sums over i and over j; `logits` [C (i), C (j), N].

    What it converges to is the softmax with each row and each column scaled, so its gradient is that of the logarithms
    less what rows and columns have in common. Taking this off by turns converges as the divisions did; going through
    each of them backwards takes 7.5 ms instead of 1.6 for 4,096 tokens, for the same gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
        values = torch.softmax(logits, 1).add_(eps)
        for number in range(2 * iterations - 1):
            values.div_(values.sum(number % 2, keepdim=True).add_(eps))
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (values,) = ctx.saved_tensors
        grad = grads[0] * values
        for number in range(_TURNS):
            grad = torch.addcmul(grad, values, grad.sum(number % 2, keepdim=True), value=-1)
        return grad, None, None


def sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """[N, C, C] -> the same, rows and columns adding up to one (spec §2.3)."""
    out: torch.Tensor = _Sinkhorn.apply(logits.permute(1, 2, 0).contiguous(), eps, iterations)
    return out.permute(2, 0, 1)


class Mix(NamedTuple):
    """`pre` [N, C], `post` [N, C], `comb` [N, C (source), C (target)]."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def mix(streams: torch.Tensor, w: Weights, name: str, eps: float, iterations: int) -> Mix:
    """Coefficients of one sub-layer from the residual `streams` [N, C, D] (spec §2.3)."""
    num = streams.shape[1]
    flat = streams.flatten(1)
    with torch.autocast("cpu", enabled=False):
        values = functional.linear(flat, w[f"{name}_fn"])
        values = values * torch.rsqrt(flat.square().mean(1, keepdim=True) + 1e-20)
        scale = w[f"{name}_scale"].repeat_interleave(torch.tensor([num, num, num * num]))
        values = values * scale + w[f"{name}_base"]
        gates = torch.sigmoid(values[:, : 2 * num])
        comb = sinkhorn(values[:, 2 * num :].view(-1, num, num), eps, iterations)
    return Mix(gates[:, :num] + eps, 2 * gates[:, num:], comb)


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """[N, C, D], [N, C] -> [N, D]."""
    with torch.autocast("cpu", enabled=False):
        return _collapse(streams, pre)


def expand(y: torch.Tensor, streams: torch.Tensor, mixed: Mix) -> torch.Tensor:
    """A sub-layer's output `y` [N, D] added to the re-mixed `streams` [N, C, D]."""
    with torch.autocast("cpu", enabled=False):
        return _expand(y.float(), streams, mixed.post, mixed.comb)


def _collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return (pre.unsqueeze(2) * streams).sum(1)


def _expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return (comb.unsqueeze(3) * streams.unsqueeze(2)).sum(1) + post.unsqueeze(2) * y.unsqueeze(1)


def fuse() -> None:
    """Compile what is many passes over memory otherwise. Needs a C++ compiler; takes half a minute."""
    global _collapse, _expand
    _collapse, _expand = (torch.compile(each, dynamic=True) for each in (_collapse, _expand))


def experts(
    x: torch.Tensor, w: Weights, name: str, bias: torch.Tensor, num_picks: int, factor: float, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture of experts (spec §2.4) on `x` [N, D] -> output [N, D] and which experts were picked [N, E] bool.

    `bias` is [E] or [N, E]. Every expert is computed for every token and those not picked count nothing: at these sizes
    eight small products would be quicker (18 instead of 26 ms for 2,048 tokens, 5 % of a step), with more code.
    """
    with torch.autocast("cpu", enabled=False):
        score = functional.softplus(functional.linear(x.float(), w[f"{name}.gate.weight"])).clamp_min(1e-30).sqrt()
    picked = (score.detach() + bias).topk(num_picks, -1).indices
    is_picked = torch.zeros_like(score, dtype=torch.bool).scatter_(1, picked, True)
    share = score * is_picked
    share = share / (share.sum(1, keepdim=True) + 1e-20) * factor
    num, inter, dim = w[f"{name}.experts.w1.weight"].shape
    gate = product(x, w[f"{name}.experts.w1.weight"].view(-1, dim))
    up = product(x, w[f"{name}.experts.w3.weight"].view(-1, dim))
    hidden = activate(gate, up, limit).view(-1, num, inter) * share.to(gate.dtype).unsqueeze(2)
    routed = product(hidden.flatten(1), w[f"{name}.experts.w2.weight"].transpose(0, 1).flatten(1))
    shared = f"{name}.shared_experts"
    hidden = activate(product(x, w[f"{shared}.w1.weight"]), product(x, w[f"{shared}.w3.weight"]), limit)
    return routed + product(hidden, w[f"{shared}.w2.weight"]), is_picked


def activate(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """SwiGLU, its `gate` held below `limit` and `up` within it on both sides (spec §2.4)."""
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def add_memory(streams: torch.Tensor, rows: torch.Tensor, alive: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    """Engram (spec §7.4): `streams` [N, C, D] plus the gated memory of table `rows` [N, n]; `alive` [N] bool."""
    num, dim = streams.shape[1:]
    looked_up = functional.embedding(rows, w[f"{name}.embed.weight"]).flatten(1)
    parts = product(looked_up, w[f"{name}.wkv.weight"]).float().view(-1, num + 1, dim)
    keys, value = parts[:, :num], parts[:, num:]
    dot = (streams * (w[f"{name}.q_weight"] * w[f"{name}.k_weight"]) * keys).sum(-1)
    scale = torch.rsqrt(streams.square().mean(-1) + 1e-20) * torch.rsqrt(keys.square().mean(-1) + 1e-20)
    dot = dot * scale * dim**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt()) * alive.unsqueeze(1)
    return streams + gate.unsqueeze(2) * value
