"""What a tenant may use: asked before a request is computed, told when it has ended."""

from __future__ import annotations

from schemas.message import Message


class AdmitCall(Message, frozen=True):
    """Recipe → the quota actor that owns the tenant: may it have this request, with a prompt of so many tokens?

    A refusal is `rate_limited`, with `retry_after_s`: then it may, if nothing else comes between.
    """

    tenant: str
    request_id: str
    num_prompt_tokens: int


class Admitted(Message, frozen=True):
    """It may."""


class TokensUsed(Message, frozen=True):
    """Recipe → the same: an admitted request has ended, after `num_output_tokens`. Counted once, however often told."""

    tenant: str
    request_id: str
    num_output_tokens: int
