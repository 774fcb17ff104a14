"""What a client reads of its prompt's cached tokens, in all three protocols, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.context import Context

from actors.recipe.converter import Converter
from actors.recipe.requests import OpenRequests
from schemas.api import Call, Protocol
from schemas.bulk import Payload
from schemas.request import Finished, FinishReason, TokensEmitted
from tests.actors.bodies import CHAT, GENERATING, ID, RESPONSES, prepare

STOP = Finished(reason=FinishReason.STOP)
LENGTH = Finished(reason=FinishReason.LENGTH)


class Door:
    """Nobody listens."""

    def put(self, items: list[bytes], *, is_last: bool = False, status: int = 200) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""


def opened(converter: Converter, protocol: Protocol, is_stream: bool) -> OpenRequests:
    requests = OpenRequests()
    call = Call(request_id=ID, gateway="g0", stream_id=1, protocol=protocol, body=Payload())
    request = requests.begin(call, Door(), Context(), 0.0)  # type: ignore[arg-type]
    request.begin(converter, prepare(converter, protocol, stream=is_stream), 1700000000)
    return requests


def emitted(first: int, tokens: list[int], end: Finished | None = None, cached: int = 0) -> TokensEmitted:
    return TokensEmitted(
        source="entrypoint/e0",
        request_ids=[ID],
        epochs=[1],
        first_indexes=[first],
        counts=[len(tokens)],
        tokens=tokens,
        ends=[(0, end)] if end else [],
        cached=[(0, cached)] if cached else [],
    )


def usages(items: list[bytes]) -> Iterator[dict[str, Any]]:
    """Every account of the prompt that is given, in order."""
    for item in map(json.loads, items):
        for holder in (item, item.get("message"), item.get("response")):
            if isinstance(holder, dict) and holder.get("usage"):
                yield holder["usage"]


def prompt_of(protocol: Protocol, usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt: cached, and all."""
    if protocol is CHAT:
        cached = usage["prompt_cache_hit_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
        assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - cached
        return cached, usage["prompt_tokens"]
    if protocol is RESPONSES:
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    assert usage["cache_creation_input_tokens"] == 0
    cached = usage["cache_read_input_tokens"]
    return cached, usage["input_tokens"] + cached


def told(requests: OpenRequests, messages: list[TokensEmitted]) -> list[bytes]:
    outcomes = [outcome for message in messages for _, outcome in requests.apply(message, 1.0)[0]]
    assert outcomes[-1].is_last
    return [item for outcome in outcomes for item in outcome.items]


@pytest.mark.parametrize("protocol", GENERATING)
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("cached", [0, 3])
@pytest.mark.parametrize("case", ["tokens", "no tokens", "only the end token", "after a resend", "doubled"])
def test_hit_and_miss_in_every_account(
    converter: Converter, protocol: Protocol, is_stream: bool, cached: int, case: str
) -> None:
    tokens = converter.tokenizer.encode("Hello there, how are you?")
    requests = opened(converter, protocol, is_stream)
    request = requests.get(ID)
    assert request is not None and len(tokens) > 2
    messages = {
        "tokens": [emitted(0, tokens[:1], None, cached), emitted(1, tokens[1:], STOP)],
        "no tokens": [emitted(0, [], LENGTH, cached)],
        "only the end token": [emitted(0, [converter.card.eos_token], STOP, cached)],
        "after a resend": [emitted(1, tokens[1:]), emitted(0, tokens, STOP, cached)],
        "doubled": [emitted(0, tokens[:1], None, cached), emitted(0, tokens[:1]), emitted(0, tokens, STOP, cached)],
    }[case]
    found = list(usages(told(requests, messages)))
    assert len(found) == (2 if protocol is Protocol.MESSAGES and is_stream else 1)
    for usage in found:
        assert prompt_of(protocol, usage) == (cached, request.num_prompt_tokens)


def test_the_record_of_a_request_says_it_too(converter: Converter) -> None:
    requests = opened(converter, CHAT, True)
    request = requests.get(ID)
    assert request is not None
    requests.apply(emitted(0, [300], None, 4), 1.0)
    requests.apply(emitted(0, [300]), 1.0)
    [(_, outcome)], _ = requests.apply(emitted(1, [301], STOP), 1.0)
    record = request.close(outcome, 1.0)
    assert record is not None and record["num_cached"] == 4 and record["num_input"] == request.num_prompt_tokens
