"""Sampling: argmax(logits / temperature + Gumbel noise) after top-p, with noise that is a function, not a stream.

The noise of a token depends on the request's seed, the position it is sampled for and its id, and on nothing else: not
on the batch, the replica, or how many drafts came before. So every schedule of the same request gives the same tokens.
"""

from __future__ import annotations

import torch

from kernels.ops.dispatch import by_device

# Constants of the SplitMix64 generator, as signed 64-bit integers (products wrap around).
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64

MIN_TEMPERATURE = 1e-5  # the reference's floor for temperatures that are not zero


def _shift(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Unsigned right shift of int64."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit words (int64, any shape) that looks random."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def token_key(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """What the noise of all tokens at a position grows from: int64 `[rows]`."""
    return _mix(_mix(seed) + position * _GAMMA)


def gumbel(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, fp32 `[rows, vocab_size]`, for int64 `seed` and `position` `[rows]`.

    Integer arithmetic down to 52 random bits, then logarithms in fp64 rounded to fp32, so that devices whose
    logarithms differ in the last place agree.
    """
    key = token_key(seed, position)
    token = torch.arange(vocab_size, dtype=torch.int64, device=seed.device)
    bits = _shift(_mix(key[:, None] + (token + 1) * _GAMMA), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # exact, and never 0 or 1
    return (-torch.log(-torch.log(uniform))).float()


def keep_top_p(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what is outside the smallest set of most likely tokens whose probability reaches `top_p`.

    scaled: fp32 `[rows, vocab_size]` logits over temperature; top_p: fp32 `[rows]` in (0, 1]. Equally likely tokens
    enter in order of id. The likeliest token always stays.
    """
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered.double(), dim=-1)
    before = torch.cumsum(probability, dim=-1) - probability
    ordered = ordered.masked_fill(before >= top_p.double()[:, None], -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, ids, ordered)


def argmax_lowest(scores: torch.Tensor) -> torch.Tensor:
    """The column of the largest value of each row, the lowest one of equals; int64 `[rows]`.

    A row that holds a NaN gives the number of columns, which is no token.
    """
    num_columns = scores.shape[-1]
    column = torch.arange(num_columns, device=scores.device)
    return torch.where(scores == scores.amax(-1, keepdim=True), column, num_columns).amin(-1)


@by_device
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """The next token of each row, int64 `[rows]`.

    logits: fp32 `[rows, vocab_size]`, masked tokens at -inf; temperature, top_p: fp32 `[rows]`; seed, position: int64
    `[rows]`, `position` being that of the token to be sampled. Temperature 0 is greedy. Rows do not affect one another.
    Raises ValueError when a row of logits holds a NaN.
    """
    scores = logits
    warm = (temperature > 0).nonzero().flatten()
    if len(warm):
        scaled = logits[warm] / temperature[warm].clamp(min=MIN_TEMPERATURE)[:, None]
        nucleus = (top_p[warm] < 1).nonzero().flatten()
        if len(nucleus):
            scaled[nucleus] = keep_top_p(scaled[nucleus], top_p[warm][nucleus])
        scores = logits.index_copy(0, warm, scaled + gumbel(seed[warm], position[warm], logits.shape[-1]))
    tokens = argmax_lowest(scores)
    if bool((tokens >= logits.shape[-1]).any()):
        raise ValueError("logits hold a NaN")
    return tokens
