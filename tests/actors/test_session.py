"""The output side of the recipe: tokens become events, or one body, in all three protocols."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actors.recipe.converter import Converter, Prepared
from actors.recipe.protocol import response_id
from actors.recipe.session import Session
from schemas.api import Protocol
from schemas.failure import Code, Failure
from schemas.request import FinishReason
from tests.actors.bodies import CHAT, GENERATING, ID, MESSAGES, RESPONSES, prepare

TOOL = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">hi</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def run(
    converter: Converter, prepared: Prepared, parts: list[list[int]], reason: FinishReason = FinishReason.STOP
) -> Iterator[dict[str, Any]]:
    session = Session(converter, prepared, ID, 1700000000)
    for tokens in parts:
        yield from map(json.loads, session.push(tokens))
        if session.is_stopped:
            break
    yield from map(json.loads, session.finish(reason, 1700000005))


def text_of(protocol: Protocol, events: list[dict[str, Any]]) -> str:
    if protocol is CHAT:
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    if protocol is RESPONSES:
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def usage_of(protocol: Protocol, events: list[dict[str, Any]]) -> tuple[int, int]:
    if protocol is CHAT:
        usage = events[-1]["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]
    if protocol is RESPONSES:
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["output_tokens"]
    usage = events[-2]["usage"]
    return usage["input_tokens"], usage["output_tokens"]


def body_text(protocol: Protocol, answer: dict[str, Any]) -> str:
    if protocol is CHAT:
        return str(answer["choices"][0]["message"]["content"])
    if protocol is RESPONSES:
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


TEXT = "Hello there, 你好 🦀! naïve — done."


@pytest.mark.parametrize("protocol", GENERATING)
def test_tokens_that_come_together_are_one_event(converter: Converter, protocol: Protocol) -> None:
    prepared = prepare(converter, protocol, stream=True)
    tokens = converter.tokenizer.encode("One after the other.")
    parts = [tokens[:4], tokens[4:5], tokens[5:]]
    session = Session(converter, prepared, ID, 1700000000)
    session.push([])
    events = [json.loads(item) for part in parts for item in session.push(part)]
    texts = [text for event in events if (text := text_of(protocol, [event]))]
    assert len(texts) == 3 and "".join(texts) == "One after the other."


@pytest.mark.parametrize("protocol", GENERATING)
def test_what_is_said_does_not_depend_on_grouping(converter: Converter, protocol: Protocol) -> None:
    tokens = converter.tokenizer.encode(TEXT)
    prepared = prepare(converter, protocol, stream=True)
    for size in (1, 2, 3, 5, 1000):
        events = list(run(converter, prepared, [tokens[i : i + size] for i in range(0, len(tokens), size)]))
        assert text_of(protocol, events) == TEXT
        assert usage_of(protocol, events) == (prepared.num_prompt_tokens, len(tokens))


def test_events_of_a_group_part_where_the_protocol_does(converter: Converter) -> None:
    """Thinking, answer and call in one group: what a client puts together is as of single tokens."""
    tokens = converter.tokenizer.encode("Let me see.</think>Yes, it is." + CALLS)
    tools = [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]
    prepared = prepare(converter, CHAT, stream=True, thinking={"type": "enabled"}, tools=tools)
    said = []
    for size in (1, 5, len(tokens)):
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        events = list(run(converter, prepared, parts))
        deltas = [event["choices"][0]["delta"] for event in events]
        calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
        thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        said.append((thought, text_of(CHAT, events), "".join(calls), events[-1]["usage"]))
    assert said[0][:3] == ("Let me see.", "Yes, it is.", '{"a": "hi"}')
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("protocol", GENERATING)
def test_one_body(converter: Converter, protocol: Protocol) -> None:
    tokens = converter.tokenizer.encode(TEXT)
    prepared = prepare(converter, protocol)
    [answer] = run(converter, prepared, [[token] for token in tokens])
    assert body_text(protocol, answer) == TEXT
    assert answer["id"] == response_id(protocol, ID)
    assert answer["model"] == "tiny"
    usage = answer["usage"]
    spent = [usage.get("completion_tokens", usage.get("output_tokens"))]
    assert spent == [len(tokens)]


def test_a_character_split_over_tokens_comes_whole(converter: Converter) -> None:
    tokens = converter.tokenizer.encode("🦀")
    assert len(tokens) > 1
    session = Session(converter, prepare(converter, CHAT, stream=True), ID, 0)
    session.push([])
    assert all(session.push([token]) == [] for token in tokens[:-1])
    [event] = session.push(tokens[-1:])
    assert json.loads(event)["choices"][0]["delta"]["content"] == "🦀"


def test_an_output_cut_within_a_character_still_ends(converter: Converter) -> None:
    tokens = converter.tokenizer.encode("a🦀")[:-1]
    events = list(run(converter, prepare(converter, CHAT, stream=True), [tokens], FinishReason.LENGTH))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert text_of(CHAT, events) == "a"
    session = Session(converter, prepare(converter, CHAT, stream=True), ID, 0)
    assert text_of(CHAT, [json.loads(item) for item in session.push(tokens)]) == "a", "held back for the rest of it"


def test_the_end_token_is_not_text(converter: Converter) -> None:
    tokens = converter.tokenizer.encode("Hi")
    events = list(run(converter, prepare(converter, CHAT, stream=True), [[*tokens, converter.card.eos_token]]))
    assert text_of(CHAT, events) == "Hi"


def test_times_are_ours_when_the_librarys_clock_agrees(converter: Converter) -> None:
    now_s = int(time.time())  # either way: the second may end before the library looks
    session = Session(converter, prepare(converter, CHAT, stream=True), ID, now_s)
    items = [item for token in converter.tokenizer.encode(TEXT) for item in session.push([token])]
    assert {json.loads(item)["created"] for item in items} == {now_s}


def test_times_are_ours(converter: Converter) -> None:
    tokens = converter.tokenizer.encode(TEXT)
    for events in (
        list(run(converter, prepare(converter, CHAT, stream=True), [tokens])),
        list(run(converter, prepare(converter, CHAT), [tokens])),
    ):
        assert {event["created"] for event in events} == {1700000000}
    for events in (
        list(run(converter, prepare(converter, RESPONSES, stream=True), [tokens])),
        [{"response": answer} for answer in run(converter, prepare(converter, RESPONSES), [tokens])],
    ):
        responses = [event["response"] for event in events if "response" in event]
        assert {response["created_at"] for response in responses} == {1700000000}
        assert responses[-1]["completed_at"] == 1700000005
    session = Session(converter, prepare(converter, CHAT, stream=True), ID, 3)
    assert json.loads(session.push([])[0])["created"] == 3  # a simulated clock starts anywhere


@pytest.mark.parametrize("protocol", [CHAT, MESSAGES])
@pytest.mark.parametrize("is_stream", [True, False])
def test_stop_sequences(converter: Converter, protocol: Protocol, is_stream: bool) -> None:
    name = "stop" if protocol is CHAT else "stop_sequences"
    prepared = prepare(converter, protocol, stream=is_stream, **{name: ["there,"]})
    session = Session(converter, prepared, ID, 0)
    items = []
    for token in converter.tokenizer.encode(TEXT):
        items += session.push([token])
        if session.is_stopped:
            break
    assert session.is_stopped
    events = [json.loads(item) for item in [*items, *session.finish(FinishReason.STOP, 0)]]
    if is_stream:
        assert text_of(protocol, events) == "Hello "
    else:
        assert body_text(protocol, events[0]) == "Hello "
    if protocol is MESSAGES:
        last = events[-2]["delta"] if is_stream else events[0]
        assert (last["stop_reason"], last["stop_sequence"]) == ("stop_sequence", "there,")


@pytest.mark.parametrize("protocol", GENERATING)
def test_length(converter: Converter, protocol: Protocol) -> None:
    [answer] = run(converter, prepare(converter, protocol), [converter.tokenizer.encode("Hi")], FinishReason.LENGTH)
    if protocol is CHAT:
        assert answer["choices"][0]["finish_reason"] == "length"
    elif protocol is RESPONSES:
        assert answer["status"] == "incomplete"
    else:
        assert answer["stop_reason"] == "max_tokens"


def test_reasoning_comes_apart(converter: Converter) -> None:
    prepared = prepare(converter, CHAT, thinking={"type": "enabled"})
    [answer] = run(converter, prepared, [converter.tokenizer.encode("Let me see.</think>Yes.")])
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")


def test_tool_calls_are_parsed(converter: Converter) -> None:
    tokens = converter.tokenizer.encode("ok" + CALLS)
    chat = prepare(converter, CHAT, tools=[{"type": "function", "function": {"name": "f", "parameters": TOOL}}])
    [answer] = run(converter, chat, [tokens])
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": "hi"})
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    anthropic = prepare(converter, MESSAGES, tools=[{"name": "f", "input_schema": TOOL}])
    [answer] = run(converter, anthropic, [tokens])
    assert answer["content"][1]["input"] == {"a": "hi"}
    responses = prepare(converter, RESPONSES, tools=[{"type": "function", "name": "f", "parameters": TOOL}])
    [answer] = run(converter, responses, [tokens])
    assert json.loads(answer["output"][1]["arguments"]) == {"a": "hi"}


FAILURE = Failure(code=Code.WORKER_LOST, message="gone", field="")


@pytest.mark.parametrize("protocol", GENERATING)
@pytest.mark.parametrize("has_started", [True, False])
def test_failures(converter: Converter, protocol: Protocol, has_started: bool) -> None:
    session = Session(converter, prepare(converter, protocol, stream=True), ID, 0)
    num_events = len(session.push([300])) if has_started else 0
    assert session.has_started is has_started
    error = json.loads(session.fail(FAILURE))
    assert error["error"]["message"] == "gone"
    if protocol is MESSAGES:
        assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "overloaded_error", ID)
    else:
        assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "worker_lost")
    if protocol is RESPONSES and has_started:
        assert (error["type"], error["sequence_number"]) == ("error", num_events)


def test_sequence_numbers_of_responses(converter: Converter) -> None:
    events = list(run(converter, prepare(converter, RESPONSES, stream=True), [converter.tokenizer.encode(TEXT)]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_every_pair_of_chunkings_of_a_stop_sequence(converter: Converter) -> None:
    """Wherever the tokens are cut into two groups, the same is said and the same is left out."""
    tokens = converter.tokenizer.encode("one two three")
    prepared = prepare(converter, CHAT, stream=True, stop=["two t"])
    outcomes = set()
    for cut in range(len(tokens)):
        events = list(run(converter, prepared, [tokens[:cut], tokens[cut:]]))
        outcomes.add((text_of(CHAT, events), str(events[-1])))
    assert len(outcomes) == 1
    assert outcomes.pop()[0] == "one "
