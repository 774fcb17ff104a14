"""A request's life as its client sees it: submit, tokens, one terminal event, cancel."""

from __future__ import annotations

from enum import StrEnum

from schemas.bulk import Payload
from schemas.failure import Failure
from schemas.message import Message
from schemas.vision import Image


class Sampling(Message, frozen=True):
    """How tokens are chosen: argmax(logits / temperature + Gumbel(seed, position)) after top-k, min-p and top-p (design
    §5).

    `temperature` 0 is greedy. `seed` is always set: drawn at the edge when the client gave none. `top_logprobs`: how
    many of the likeliest tokens are named with each one sampled, -1 when not even its own is asked for. `grammar`: what
    the whole output has to be, in the language of llguidance; anything when there is none. `logit_bias`: (token, what
    is added to its logit), each token once. `top_k`: 0 for all tokens; `min_p`: against the likeliest one.
    """

    temperature: float
    top_p: float
    seed: int
    top_logprobs: int = -1
    grammar: str = ""
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_k: int = 0
    min_p: float = 0.0


class Limits(Message, frozen=True):
    """When generation stops by itself: not before `min_tokens`, unless a grammar leaves nothing to say. `deadline_ns`
    is unix time; 0 means none."""

    max_tokens: int
    deadline_ns: int = 0
    min_tokens: int = 0


class Submit(Message, frozen=True):
    """Recipe → entrypoint shard: take ownership of this request.

    `prompt` holds the token ids as little-endian u32, with the model's image token at every position of `images`, which
    are in the order of their spans. `recipe` is the id of the recipe actor that wants the tokens. `exact`: compute
    everything, approximate nothing (design §5). `cache`: whose cached blocks it may use and adds to. `branches`: with
    so many of its first tokens other prompts are likely to begin, too; ascending. `num_output`: behind the prompt come
    so many tokens of output, of which the shard that had it has told; this one goes on from there.
    """

    request_id: str
    recipe: str
    tenant: str
    prompt: Payload
    num_prompt_tokens: int
    sampling: Sampling
    limits: Limits
    images: list[Image] = []
    exact: bool = False
    cache: str = ""
    branches: list[int] = []
    num_output: int = 0


class Submitted(Message, frozen=True):
    """The shard owns the request now; exactly one terminal event will follow."""

    shard: str


class FinishReason(StrEnum):
    """Why generation ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class Finished(Message, frozen=True):
    """Terminal: generation ended by itself."""

    reason: FinishReason


class Cancelled(Message, frozen=True):
    """Terminal: the client asked for it, or is gone."""


class Failed(Message, frozen=True):
    """Terminal: a typed error."""

    failure: Failure


End = Finished | Cancelled | Failed


class Preempted(Message, frozen=True):
    """Not terminal: who had the request has let go of it to make room for others, and its entrypoint places it anew,
    with its output so far."""


LastWord = End | Preempted
"""What an owner says last of a request."""


class TokenLogprobs(Message, frozen=True):
    """Of the tokens of one entry: each one's own, and of as many likely ones as were asked for, token by token.

    Natural logarithms of what the model gives before temperature, masks and top-p. `top_tokens` and `top` hold the same
    number for each token, likeliest first.
    """

    sampled: list[float]
    top_tokens: list[int] = []
    top: list[float] = []


class TokensEmitted(Message, frozen=True):
    """New tokens of many requests, struct of arrays: one message per step and destination.

    Request i has `counts[i]` tokens, taken from `tokens` in order; the first of them has index `first_indexes[i]`
    in its output, which is also the sequence number by which receivers find gaps and duplicates. `epochs[i]` is the
    ownership under which they were made. `ends` holds (i, what is said last) for requests that end after these tokens
    or, from decode, are given back: an entrypoint says ends only,
    `cached` (i, prompt tokens that were not computed) for those whose first tokens these are: only an entrypoint knows.
    `logprobs` holds (i, those of its tokens) for requests that asked.
    """

    source: str
    request_ids: list[str]
    epochs: list[int]
    first_indexes: list[int]
    counts: list[int]
    tokens: list[int]
    ends: list[tuple[int, LastWord]] = []
    cached: list[tuple[int, int]] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []


class Taken(Message, frozen=True):
    """The receipt for a batch of tokens or events: its receiver has dealt with it, and can take another."""


class Resend(Message, frozen=True):
    """Answer with all tokens from these indexes on (gap repair), and with the end if there was one.

    Also the probe for lost events and lost owners: a request the receiver does not know is answered with
    `Failed(worker_lost)` as its end, under the epoch asked with. The answer is one `TokensEmitted`; what did not fit
    is left out, and can be asked for again. `without_logprobs`: the tokens alone will do, which are kept for longer.
    """

    request_ids: list[str]
    first_indexes: list[int]
    epochs: list[int]
    without_logprobs: bool = False


class CancelReason(StrEnum):
    """Who wants a request to end early."""

    CLIENT = "client"
    CLIENT_GONE = "client_gone"
    CLIENT_TOO_SLOW = "client_too_slow"
    STOP_SEQUENCE = "stop_sequence"


class Cancel(Message, frozen=True):
    """End a request early. Idempotent; acknowledged by every hop that knows the request.

    With an `epoch`, only who holds the request under that or an earlier one is meant; 0 means whoever holds it.
    """

    request_id: str
    reason: CancelReason = CancelReason.CLIENT
    epoch: int = 0


class CancelAcknowledged(Message, frozen=True):
    """`was_running` is False when the request had ended, or was never known here."""

    request_id: str
    was_running: bool
