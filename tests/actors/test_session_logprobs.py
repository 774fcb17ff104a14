"""Logprobs and stop strings in the protocols' own fields: the same however tokens are grouped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.context import Context

from actors.recipe import requests
from actors.recipe.converter import Converter, Prepared
from actors.recipe.fields import Refusal
from actors.recipe.session import Session
from actors.rules.emission import Emission
from actors.rules.logprobs import cut, message_of
from kernels.constraint import Logprobs
from schemas.api import Call, Protocol
from schemas.bulk import Payload
from schemas.failure import Code
from schemas.request import CancelReason, Finished, FinishReason, TokenLogprobs
from tests.actors.bodies import CHAT, ID, MESSAGES, RESPONSES, prepare

TEXT = "Hi é日🙂, naïve!"
SIZES = (1, 2, 3, 5, 1000)


def said_of(tokens: list[int], num_top: int) -> TokenLogprobs:
    """Each token's place is in its own; the likeliest are itself and those before it."""
    return message_of(
        [
            Logprobs(-i / 8, [(tokens[max(i - back, 0)], -i / 8 - back) for back in range(num_top)])
            for i in range(len(tokens))
        ]
    )


def run(
    converter: Converter,
    prepared: Prepared,
    tokens: list[int],
    size: int,
    said: TokenLogprobs | None = None,
    reason: FinishReason = FinishReason.STOP,
) -> list[dict[str, Any]]:
    session = Session(converter, prepared, ID, 0)
    items: list[bytes] = []
    for start in range(0, len(tokens), size):
        items += session.push(tokens[start : start + size], said and cut(said, start, start + size))
        if session.is_stopped:
            break
    return [json.loads(item) for item in [*items, *session.finish(reason, 0)]]


def logprobs_of(protocol: Protocol, events: list[dict[str, Any]], field: str = "content") -> list[dict[str, Any]]:
    """All that a stream, or one body, says of them."""
    found: list[dict[str, Any]] = []
    for event in events:
        if protocol is CHAT:
            found += ((event["choices"][0].get("logprobs") or {}).get(field)) or []
        elif event.get("object") == "response":
            found += event["output"][-1]["content"][0]["logprobs"]
        elif event["type"] == "response.output_text.delta":
            found += event["logprobs"]
    return found


ASKING: list[tuple[Protocol, dict[str, Any], int]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 3}, 3),
    (CHAT, {"logprobs": True}, 0),
    (RESPONSES, {"top_logprobs": 2}, 2),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, 0),
]


@pytest.mark.parametrize(("protocol", "fields", "num_top"), ASKING)
@pytest.mark.parametrize("is_stream", [True, False])
def test_they_are_of_the_bytes_of_each_token(
    converter: Converter, protocol: Protocol, fields: dict[str, Any], num_top: int, is_stream: bool
) -> None:
    tokens = converter.tokenizer.encode(TEXT)
    prepared = prepare(converter, protocol, stream=is_stream, **fields)
    assert prepared.sampling.top_logprobs == num_top
    said = said_of(tokens, num_top)
    for size in SIZES:
        entries = logprobs_of(protocol, run(converter, prepared, tokens, size, said))
        assert [entry["logprob"] for entry in entries] == said.sampled
        spelled = [bytes(entry["bytes"]) for entry in entries]
        assert b"".join(spelled).decode() == TEXT and len(spelled) > len(TEXT.split())
        for i, entry in enumerate(entries):
            top = entry["top_logprobs"]
            assert [one["logprob"] for one in top] == said.top[i * num_top : (i + 1) * num_top]
            assert [bytes(one["bytes"]) for one in top] == [spelled[max(i - back, 0)] for back in range(num_top)]
            assert entry["token"] == spelled[i].decode(errors="backslashreplace")


def test_those_of_the_reasoning_are_apart(converter: Converter) -> None:
    tokens = converter.tokenizer.encode("Let me see.</think>Yes.")
    fields = {"thinking": {"type": "enabled"}, "logprobs": True}
    for is_stream in (True, False):
        prepared, seen = prepare(converter, CHAT, stream=is_stream, **fields), set()
        for size in SIZES:
            events = run(converter, prepared, tokens, size, said_of(tokens, 1))
            thought, answer = (logprobs_of(CHAT, events, field) for field in ("reasoning_content", "content"))
            assert bytes(sum((entry["bytes"] for entry in thought), [])) == b"Let me see."
            assert bytes(sum((entry["bytes"] for entry in answer), [])) == b"Yes."
            seen.add(json.dumps([thought, answer]))
        assert len(seen) == 1


def test_who_does_not_ask_is_told_nothing_and_who_asks_must_be_told(converter: Converter) -> None:
    tokens = converter.tokenizer.encode(TEXT)
    for protocol in (CHAT, RESPONSES):
        assert logprobs_of(protocol, run(converter, prepare(converter, protocol), tokens, 3, said_of(tokens, 1))) == []
    session = Session(converter, prepare(converter, CHAT, logprobs=True), ID, 0)
    with pytest.raises(Refusal, match="logprobs") as refused:
        session.push(tokens)
    assert refused.value.failure.code is Code.INTERNAL


class NoDoor:
    def close(self) -> None:
        pass


def opened(converter: Converter, asking: dict[str, tuple[Protocol, dict[str, Any]]]) -> requests.OpenRequests:
    """Requests that wait for tokens, by id."""
    them = requests.OpenRequests()
    for id, (protocol, fields) in asking.items():
        call = Call(1, "g0", protocol, Payload(), request_id=id)
        request = them.begin(call, NoDoor(), Context(), 0.0)  # type: ignore[arg-type]
        request.begin(converter, prepare(converter, protocol, **fields), 0)
    return them


def test_who_gathers_most_gives_way(converter: Converter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_GATHERED", 14)
    asking: dict[str, tuple[Protocol, dict[str, Any]]] = {
        "stream": (CHAT, {"stream": True, "logprobs": True, "top_logprobs": 3}),
        "much": (RESPONSES, {"stream": True, "top_logprobs": 3}),
        "little": (CHAT, {"logprobs": True}),
        "none": (CHAT, {}),
    }
    them, failed = opened(converter, asking), []
    for index, token in enumerate(converter.tokenizer.encode(TEXT)[:3]):
        emission = Emission("entrypoint/e0")
        for id, (_, fields) in asking.items():
            said = said_of([token], fields.get("top_logprobs", 0)) if id != "none" else None
            emission.add(id, 1, index, [token], logprobs=said)
        (message,) = emission.take()
        outcomes, _ = them.apply(message, 0.0)
        failed.append([(request.id, outcome.must_cancel) for request, outcome in outcomes if outcome.is_last])
    assert failed == [[], [], [("much", CancelReason.CLIENT)]], "15 of them: 4 a token of one, 1 of the other"


def test_of_repeated_tokens_theirs_are_skipped(converter: Converter) -> None:
    them = opened(converter, {"r": (CHAT, {"stream": True, "logprobs": True, "top_logprobs": 2})})
    tokens, events = converter.tokenizer.encode(TEXT), []
    said = said_of(tokens, 2)
    for start, stop in ((0, 3), (1, 5), (0, len(tokens))):
        emission = Emission("entrypoint/e0")
        emission.add("r", 1, start, tokens[start:stop], logprobs=cut(said, start, stop))
        (message,) = emission.take()
        ((_, outcome),) = them.apply(message, 0.0)[0]
        events += [json.loads(item) for item in outcome.items]
    assert [entry["logprob"] for entry in logprobs_of(CHAT, events)] == said.sampled


@pytest.mark.parametrize(("end", "reason"), [(None, CancelReason.STOP_SEQUENCE), (FinishReason.LENGTH, None)])
def test_a_stop_string_cancels_what_has_not_ended(
    converter: Converter, end: FinishReason | None, reason: CancelReason | None
) -> None:
    them = opened(converter, {"r": (CHAT, {"stop": ["!"]})})
    emission = Emission("entrypoint/e0")
    emission.add("r", 1, 0, converter.tokenizer.encode(TEXT), Finished(reason=end) if end else None)
    (message,) = emission.take()
    ((_, outcome),) = them.apply(message, 0.0)[0]
    assert (outcome.is_last, outcome.reason, outcome.must_cancel) == (True, "stop", reason)


# Stop strings


STOPPED = [
    ("one two three", ["two t"], "one ", "two t"),
    ("one two three", ["three", "two"], "one ", "two"),
    ("one two three", ["o thr"], "one tw", "o thr"),
    ("a日本b", ["本"], "a日", "本"),
    ("so 🙂 far", ["🙂"], "so ", "🙂"),
    ("é日🙂!", ["日🙂"], "é", "日🙂"),
    ("the end", ["end"], "the ", "end"),
    ("the en", ["end"], "the en", ""),
    ("ababac", ["abac"], "ab", "abac"),
]


@pytest.mark.parametrize(("text", "stops", "answer", "found"), STOPPED)
@pytest.mark.parametrize("protocol", [CHAT, MESSAGES])
def test_stop_strings(
    converter: Converter, protocol: Protocol, text: str, stops: list[str], answer: str, found: str
) -> None:
    """Over the borders of tokens and within characters; at the very end, where the limit is reached, too."""
    tokens = converter.tokenizer.encode(text)
    name = "stop" if protocol is CHAT else "stop_sequences"
    outcomes = set()
    for is_stream in (True, False):
        prepared = prepare(converter, protocol, stream=is_stream, **{name: stops})
        for size in SIZES:
            events = run(converter, prepared, tokens, size, reason=FinishReason.LENGTH)
            outcomes.add((text_of(protocol, events), *end_of(protocol, events)))
    ((said, reason, stop, num_tokens),) = outcomes
    assert (said, stop) == (answer, found or None) if protocol is MESSAGES else said == answer
    if found:
        assert reason == ("stop" if protocol is CHAT else "stop_sequence")
        upto = next(n for n in range(len(tokens) + 1) if found.encode() in spelled(converter, tokens[:n]))
        assert num_tokens == upto, "all tokens up to the one that completes it"
    else:
        assert reason == ("length" if protocol is CHAT else "max_tokens")
        assert num_tokens == len(tokens)


def spelled(converter: Converter, tokens: list[int]) -> bytes:
    prepared = prepare(converter, CHAT, logprobs=True)
    events = run(converter, prepared, tokens, 1, said_of(tokens, 0))
    return b"".join(bytes(entry["bytes"]) for entry in logprobs_of(CHAT, events))


def text_of(protocol: Protocol, events: list[dict[str, Any]]) -> str:
    if protocol is CHAT:
        choices = [event["choices"][0] for event in events]
        return "".join(choice.get("delta", choice.get("message"))["content"] or "" for choice in choices)
    if "content" in events[0]:
        return "".join(block["text"] for block in events[0]["content"])
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def end_of(protocol: Protocol, events: list[dict[str, Any]]) -> tuple[str, str | None, int]:
    """Why it ended, the stop string where the protocol names it, and how many tokens are counted."""
    if protocol is CHAT:
        return events[-1]["choices"][0]["finish_reason"], None, events[-1]["usage"]["completion_tokens"]
    last = events[0] if "content" in events[0] else events[-2]
    end = last.get("delta", last)
    return end["stop_reason"], end["stop_sequence"], last["usage"]["output_tokens"]
