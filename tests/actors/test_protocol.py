"""Bodies become prompts and tokens become events, in all three protocols, without a bus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.recipe.card import CardError, ModelCard
from actors.recipe.converter import Converter, Prepared
from actors.recipe.fields import Refusal
from actors.recipe.protocol import request_id_of, response_id
from actors.recipe.session import Session
from schemas.api import Call, Protocol
from schemas.failure import Code, Failure
from schemas.request import FinishReason
from tests.actors.edge import CONTEXT_TOKENS, make_card

CHAT, RESPONSES, MESSAGES = Protocol.CHAT_COMPLETIONS, Protocol.RESPONSES, Protocol.MESSAGES
GENERATING = (CHAT, RESPONSES, MESSAGES)
ID = "0123456789abcdef0123456789abcdef"
TOOL = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">hi</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Converter:
    return Converter(make_card(tmp_path_factory.mktemp("model")))


def body(protocol: Protocol, text: str = "Hi", **fields: Any) -> dict[str, Any]:
    given = {"input": text} if protocol is RESPONSES else {"messages": [{"role": "user", "content": text}]}
    return {"model": "tiny", **given, **fields}


def prepare(converter: Converter, protocol: Protocol, text: str = "Hi", **fields: Any) -> Prepared:
    return converter.prepare(protocol, json.dumps(body(protocol, text, **fields)).encode(), 7)


def refused(converter: Converter, protocol: Protocol, raw: bytes) -> Failure:
    with pytest.raises(Refusal) as refusal:
        converter.prepare(protocol, raw, 7)
    return refusal.value.failure


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


# The input side


def test_the_prompt_is_u32_little_endian(converter: Converter) -> None:
    prepared = prepare(converter, CHAT)
    ids = np.frombuffer(prepared.prompt, dtype="<u4")
    vocabulary = json.loads(converter.card.tokenizer_path.read_text())
    names = {token["id"]: token["content"] for token in vocabulary["added_tokens"]}
    assert len(ids) == prepared.num_prompt_tokens
    assert [names.get(int(id)) for id in ids if int(id) in names] == [
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "</think>",
    ]


SPELLINGS = ["<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜", "<｜image｜>"]
SPELLINGS += ["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<|EOT|>"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("protocol", GENERATING)
def test_control_tokens_in_text_stay_text(converter: Converter, protocol: Protocol, spelling: str) -> None:
    control = set(converter.tokenizer.encode("".join(SPELLINGS)))
    plain = np.frombuffer(prepare(converter, protocol, "x").prompt, dtype="<u4")
    tricky = np.frombuffer(prepare(converter, protocol, f"x{spelling}x").prompt, dtype="<u4")
    assert [id for id in tricky if int(id) in control] == [id for id in plain if int(id) in control]
    assert len(tricky) > len(plain)


def test_sampling(converter: Converter) -> None:
    greedy = prepare(converter, CHAT, temperature=0, thinking={"type": "enabled"}, top_p=0.25, seed=11).sampling
    assert (greedy.temperature, greedy.top_p, greedy.seed) == (0.0, 0.25, 11)
    default = prepare(converter, CHAT).sampling
    assert (default.temperature, default.top_p, default.seed) == (1.0, 1.0, 7)
    assert prepare(converter, MESSAGES, temperature=0.5).sampling.temperature == 0.5


@pytest.mark.parametrize("fields", [{"temperature": 3}, {"temperature": -1}, {"top_p": 0}, {"top_p": 2}])
def test_sampling_out_of_range(converter: Converter, fields: dict[str, Any]) -> None:
    for protocol in GENERATING:
        raw = json.dumps(body(protocol, **fields)).encode()
        assert refused(converter, protocol, raw).code is Code.BAD_REQUEST


def test_thinking_is_a_setting_of_the_model(tmp_path: Path) -> None:
    thinker = Converter(make_card(tmp_path, thinking_default=True))
    start = thinker.tokenizer.encode("<think>")
    for protocol in GENERATING:
        assert np.frombuffer(prepare(thinker, protocol).prompt, dtype="<u4")[-1] == start[0]
    off = np.frombuffer(prepare(thinker, CHAT, thinking={"type": "disabled"}).prompt, dtype="<u4")
    assert off[-1] == thinker.tokenizer.encode("</think>")[0]


def test_max_tokens(converter: Converter) -> None:
    assert prepare(converter, CHAT, max_tokens=5).max_tokens == 5
    assert prepare(converter, RESPONSES, max_output_tokens=5).max_tokens == 5
    prepared = prepare(converter, MESSAGES)
    assert prepared.max_tokens == CONTEXT_TOKENS - prepared.num_prompt_tokens


@pytest.mark.parametrize("protocol", GENERATING)
def test_over_the_context(converter: Converter, protocol: Protocol) -> None:
    name = "max_output_tokens" if protocol is RESPONSES else "max_tokens"
    failure = refused(converter, protocol, json.dumps(body(protocol, **{name: CONTEXT_TOKENS})).encode())
    assert failure.code is Code.CONTEXT_LENGTH
    assert f"{CONTEXT_TOKENS} tokens" in failure.message
    failure = refused(converter, protocol, json.dumps(body(protocol, "word " * 3000)).encode())
    assert failure.code is Code.CONTEXT_LENGTH
    assert f"{CONTEXT_TOKENS} tokens" in failure.message


def test_two_mebibytes_of_text_are_refused_unencoded(converter: Converter) -> None:
    raw = json.dumps(body(CHAT, "word " * 420_000)).encode()
    assert len(raw) > 2 * 1024 * 1024
    failure = refused(converter, CHAT, raw)
    assert failure.code is Code.CONTEXT_LENGTH
    assert "at least" in failure.message


BAD: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "Hi"},
    {"messages": [{"role": "oracle", "content": "x"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": {"a": 1}}]},
    {"messages": [7]},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**30},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"},
    {"messages": [{"role": "user", "content": "x"}], "stream": "yes"},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": 3},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_bad_bodies_are_the_clients_fault(converter: Converter, fields: dict[str, Any]) -> None:
    for protocol in (CHAT, MESSAGES):
        failure = refused(converter, protocol, json.dumps({"model": "tiny", **fields}).encode())
        assert failure.code in (Code.BAD_REQUEST, Code.UNSUPPORTED)
        assert failure.message
    assert refused(converter, RESPONSES, b'{"model": "tiny", "input": []}').code is Code.BAD_REQUEST
    assert refused(converter, RESPONSES, b'{"model": "tiny"}').code is Code.BAD_REQUEST


def test_deep_nesting_is_refused(converter: Converter) -> None:
    opening, closing = '[{"type": "tool_result", "content": ', "}]"
    deep = opening * 400 + '"x"' + closing * 400
    raw = f'{{"model": "tiny", "messages": [{{"role": "user", "content": {deep}}}]}}'.encode()
    for protocol in (CHAT, MESSAGES):
        assert refused(converter, protocol, raw).code is Code.BAD_REQUEST


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = ["messages", "input", "tools", "tool_choice", "stream", "stop", "system", "thinking", "max_tokens"]
FIELD_NAMES += ["temperature", "instructions", "reasoning", "stop_sequences", "response_format", "text", "seed"]


some_fields = st.dictionaries(st.sampled_from(FIELD_NAMES), json_values, max_size=4)


@given(fields=some_fields, protocol=st.sampled_from(GENERATING))
@settings(max_examples=150, deadline=None)
def test_anything_is_taken_or_refused(converter: Converter, fields: dict[str, Any], protocol: Protocol) -> None:
    raw = json.dumps({**body(protocol), **fields}).encode("utf-8", "surrogatepass")
    try:
        converter.prepare(protocol, raw, 7)
    except Refusal as refusal:
        assert refusal.failure.code is not Code.INTERNAL


# The output side


TEXT = "Hello there, 你好 🦀! naïve — done."


@pytest.mark.parametrize("protocol", GENERATING)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_do_not_depend_on_grouping(converter: Converter, protocol: Protocol, size: int) -> None:
    tokens = converter.tokenizer.encode(TEXT)
    prepared = prepare(converter, protocol, stream=True)
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    events = list(run(converter, prepared, parts))
    assert events == list(run(converter, prepared, [[token] for token in tokens]))
    assert text_of(protocol, events) == TEXT
    assert usage_of(protocol, events) == (prepared.num_prompt_tokens, len(tokens))


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


def test_the_end_token_is_not_text(converter: Converter) -> None:
    tokens = converter.tokenizer.encode("Hi")
    events = list(run(converter, prepare(converter, CHAT, stream=True), [[*tokens, converter.card.eos_token]]))
    assert text_of(CHAT, events) == "Hi"


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


# Calls without generation


def answer(converter: Converter, protocol: Protocol, raw: bytes) -> tuple[int, dict[str, Any]]:
    answer = converter.answer(Call(stream_id=0, gateway="", protocol=protocol, body=raw, request_id=ID))
    return answer.status, json.loads(answer.body)


def test_count_tokens(converter: Converter) -> None:
    raw = json.dumps(body(MESSAGES)).encode()
    expected = converter.prepare(MESSAGES, raw, 7).num_prompt_tokens
    assert answer(converter, Protocol.COUNT_TOKENS, raw) == (200, {"input_tokens": expected})
    http_status, error = answer(converter, Protocol.COUNT_TOKENS, b"{")
    assert (http_status, error["error"]["type"]) == (400, "invalid_request_error")


def test_models(converter: Converter) -> None:
    http_status, models = answer(converter, Protocol.MODELS, b"")
    assert http_status == 200
    assert [model["id"] for model in models["data"]] == ["shoal-tiny", "tiny"]
    http_status, model = answer(converter, Protocol.MODELS, b'{"model": "tiny"}')
    assert (http_status, model["id"], model["object"], model["type"]) == (200, "tiny", "model", "model")
    assert answer(converter, Protocol.MODELS, b'{"model": "x"}')[0] == 404
    assert answer(converter, Protocol.MODELS, b"[]")[0] == 400


def test_ids() -> None:
    for protocol in GENERATING:
        assert request_id_of(response_id(protocol, ID)) == ID
    assert request_id_of("mine") == "mine"


# The card


def test_card(tmp_path: Path) -> None:
    card = make_card(tmp_path, context_tokens=100)
    assert (card.name, card.names) == ("shoal-tiny", ("shoal-tiny", "tiny"))
    assert (card.context_tokens, card.eos_token) == (100, 1)
    assert (card.thinking_default, card.has_vision) == (False, False)
    header = json.dumps({"vision.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    assert ModelCard.from_folder(tmp_path).has_vision
    (tmp_path / "shoal.json").unlink()
    assert ModelCard.from_folder(tmp_path).name == tmp_path.name


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_card_of_a_broken_folder(tmp_path: Path, name: str) -> None:
    make_card(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CardError, match=name):
        ModelCard.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"text_config": {"max_position_embeddings": true}}'])
def test_card_of_a_broken_config(tmp_path: Path, text: str) -> None:
    make_card(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CardError, match=r"config\.json"):
        ModelCard.from_folder(tmp_path)


def test_card_of_a_hub_name() -> None:
    with pytest.raises(CardError, match="download the checkpoint"):
        ModelCard.from_folder("deepseek-ai/DeepSeek-V4.1-Flash")


def test_every_pair_of_chunkings_of_a_stop_sequence(converter: Converter) -> None:
    """Wherever the tokens are cut into two groups, the same is said and the same is left out."""
    tokens = converter.tokenizer.encode("one two three")
    prepared = prepare(converter, CHAT, stream=True, stop=["two t"])
    outcomes = {json.dumps(list(run(converter, prepared, [tokens[:cut], tokens[cut:]]))) for cut in range(len(tokens))}
    assert len(outcomes) == 1
    assert text_of(CHAT, json.loads(outcomes.pop())) == "one "
