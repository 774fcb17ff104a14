"""How a client wants tokens chosen, and how long its answer has to be: as it said, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.recipe.fields import Refusal
from schemas.api import Protocol
from schemas.failure import Code
from schemas.request import Sampling

_MAX_SEED = 2**63
_MAX_TOP = 20
_MAX_TOP_K = 2**31
_MAX_BIAS = 100
_MAX_BIASES = 1024
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class Choice:
    """`temperature`, `top_p`, `seed` are None where the client did not say, `top_logprobs` is -1 for no logprobs."""

    temperature: float | None
    top_p: float | None
    seed: int | None
    top_logprobs: int
    min_tokens: int
    ignores_end: bool
    logit_bias: tuple[tuple[int, float], ...]
    top_k: int
    min_p: float

    def sampling(self, options: Any, seed: int) -> Sampling:
        """With what the library makes of the body, and a seed for where none was given.

        The library fixes temperature and top-p for some modes; what the client said outright holds (spec recipe.md §5).
        """
        return Sampling(
            temperature=options.temperature if self.temperature is None else self.temperature,
            top_p=options.top_p if self.top_p is None else self.top_p,
            seed=seed if self.seed is None else self.seed,
            top_logprobs=self.top_logprobs,
            logit_bias=self.logit_bias,
            top_k=self.top_k,
            min_p=self.min_p,
        )

    def check_tokens(self, num_known: int) -> None:
        """Raise Refusal if it names a token that is none of so many."""
        last = max((token for token, _ in self.logit_bias), default=-1)
        if last >= num_known:
            raise Refusal(Code.BAD_REQUEST, f"logit_bias: there is no token {last}", "logit_bias")

    def least(self, max_tokens: int) -> int:
        """How many tokens there have to be, of `max_tokens` at most. Raises Refusal."""
        if self.min_tokens > max_tokens:
            message = f"min_tokens is {self.min_tokens}, and the answer has at most {max_tokens} tokens"
            raise Refusal(Code.BAD_REQUEST, message, "min_tokens")
        return max_tokens if self.ignores_end else self.min_tokens


def take_choice(protocol: Protocol, body: dict[str, Any]) -> tuple[Choice, list[str]]:
    """What a body says of it, and the ignored fields. What only we understand is taken out. Raises Refusal."""
    seed = body.pop("seed", None) if protocol is not Protocol.CHAT_COMPLETIONS else body.get("seed")
    if seed is not None and not (_is_whole(seed) and 0 <= seed < _MAX_SEED):
        raise Refusal(Code.BAD_REQUEST, "seed must be a whole number in [0, 2^63)", "seed")
    min_tokens = body.pop("min_tokens", 0)
    if not _is_whole(min_tokens) or min_tokens < 0:
        raise Refusal(Code.BAD_REQUEST, "min_tokens must be a whole number, 0 or more", "min_tokens")
    include = body.pop("include", [])
    wants_logprobs = isinstance(include, list) and _LOGPROBS in include
    choice = Choice(
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        seed=seed,
        top_logprobs=_top_logprobs(protocol, body, wants_logprobs),
        min_tokens=min_tokens,
        ignores_end=boolean(body.pop("ignore_eos", False), "ignore_eos"),
        logit_bias=_biases(body.pop("logit_bias", {})),
        top_k=_top_k(body.pop("top_k", 0)),
        min_p=_min_p(body),
    )
    return choice, [] if include in ([], [_LOGPROBS]) else ["include"]


def boolean(value: Any, name: str) -> bool:
    """Raises Refusal."""
    if not isinstance(value, bool):
        raise Refusal(Code.BAD_REQUEST, f"{name} must be true or false", name)
    return value


def _top_logprobs(protocol: Protocol, body: dict[str, Any], are_included: bool) -> int:
    """For Chat Completions `logprobs` asks, for Responses either of `top_logprobs` and `include` does."""
    num_top = body.get("top_logprobs", 0)
    if not _is_whole(num_top) or not 0 <= num_top <= _MAX_TOP:
        raise Refusal(Code.BAD_REQUEST, f"top_logprobs must be a whole number, 0 to {_MAX_TOP}", "top_logprobs")
    is_asked = num_top > 0 or are_included
    if protocol is Protocol.CHAT_COMPLETIONS:
        is_asked = boolean(body.get("logprobs", False), "logprobs")
        if num_top and not is_asked:
            raise Refusal(Code.BAD_REQUEST, "top_logprobs is only allowed with logprobs: true", "top_logprobs")
    if not is_asked:
        body.pop("top_logprobs", None)  # the library would not have it
        return -1
    return int(num_top)


def _top_k(value: Any) -> int:
    """0 for all: as other servers have it, -1 too."""
    if not _is_whole(value) or not -1 <= value < _MAX_TOP_K:
        raise Refusal(Code.BAD_REQUEST, "top_k must be a whole number, 1 or more, or 0 for all tokens", "top_k")
    return max(int(value), 0)


def _min_p(body: dict[str, Any]) -> float:
    value = _number(body, "min_p") or 0.0
    if not 0 <= value <= 1:
        raise Refusal(Code.BAD_REQUEST, "min_p must be between 0 and 1", "min_p")
    body.pop("min_p", None)
    return value


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > _MAX_BIASES:
        message = f"logit_bias must be an object, of at most {_MAX_BIASES} tokens"
        raise Refusal(Code.BAD_REQUEST, message, "logit_bias")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise Refusal(Code.BAD_REQUEST, f"logit_bias: {token[:32]!r} is no token id", "logit_bias")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            message = f"logit_bias: that of {token} must be a number, {-_MAX_BIAS} to {_MAX_BIAS}"
            raise Refusal(Code.BAD_REQUEST, message, "logit_bias")
    biases = {int(token): float(bias) for token, bias in value.items()}
    if len(biases) < len(value):
        raise Refusal(Code.BAD_REQUEST, "logit_bias: a token has two biases, by two spellings", "logit_bias")
    return tuple(sorted(biases.items()))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(body: dict[str, Any], name: str) -> float | None:
    """An explicit number; the library checks its range."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Refusal(Code.BAD_REQUEST, f"{name} must be a number", name)
    return float(value)
