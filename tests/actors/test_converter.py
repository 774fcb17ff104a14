"""The input side of the recipe: bodies become prompts, or are refused; the model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.recipe.card import CardError, ModelCard
from actors.recipe.converter import Converter, load_converter
from actors.recipe.fields import Refusal
from actors.recipe.protocol import request_id_of, response_id
from actors.rules.errors import error_body, status
from schemas.api import Call, Protocol
from schemas.bulk import Payload
from schemas.failure import Code, Failure
from tests.actors.bodies import CHAT, GENERATING, ID, MESSAGES, RESPONSES, body, prepare, prepared
from tests.actors.edge import CONTEXT_TOKENS, IMAGE_TOKEN, make_card


def refused(converter: Converter, protocol: Protocol, raw: bytes) -> Failure:
    with pytest.raises(Refusal) as refusal:
        prepared(converter, protocol, raw)
    return refusal.value.failure


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


SYSTEM = "You answer in one word. " * 20
TOOL = {"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {}}}
HISTORY = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
SHARING: list[tuple[Protocol, str, dict[str, Any]]] = [
    (CHAT, "messages", {"messages": [{"role": "system", "content": SYSTEM}]}),
    (CHAT, "messages", {"messages": [{"role": "developer", "content": SYSTEM}]}),
    (CHAT, "messages", {"messages": [], "tools": [{"type": "function", "function": TOOL}]}),
    (CHAT, "messages", {"messages": [{"role": "system", "content": SYSTEM}, *HISTORY]}),
    (RESPONSES, "input", {"instructions": SYSTEM, "input": []}),
    (RESPONSES, "input", {"input": [{"role": "developer", "content": SYSTEM}]}),
    (RESPONSES, "input", {"input": [], "tools": [{"type": "function", **TOOL}]}),
    (MESSAGES, "messages", {"system": SYSTEM, "messages": [], "max_tokens": 5}),
    (MESSAGES, "messages", {"system": [{"type": "text", "text": SYSTEM}], "messages": HISTORY, "max_tokens": 5}),
    (
        MESSAGES,
        "messages",
        {"messages": [], "max_tokens": 5, "tools": [{"name": "f", "input_schema": TOOL["parameters"]}]},
    ),
]


@pytest.mark.parametrize(("protocol", "field", "fields"), SHARING)
def test_where_others_branch_off(
    converter: Converter, protocol: Protocol, field: str, fields: dict[str, Any]
) -> None:
    """Two prompts that differ in their question share so much, and it ends where the first question begins."""

    def ask(text: str) -> tuple[list[int], list[int]]:
        asked = {**fields, field: [*fields[field], {"role": "user", "content": text}]}
        made = prepared(converter, protocol, json.dumps({"model": "tiny", **asked}).encode())
        assert made.submission(Call(1, "g", protocol, Payload()), "rc", "").message(Payload()).branches == made.branches
        return np.frombuffer(made.prompt, dtype="<u4").tolist(), made.branches

    (first, branches), (second, others) = ask("Why?"), ask("<｜User｜>Because of what?")
    shared = next(i for i in range(len(first)) if first[i] != second[i])
    assert branches == others and branches[-1] == shared
    user = converter.tokenizer.encode("<｜User｜>")
    assert [first[end - 1] for end in branches] == user * len(branches)
    assert len(branches) == first.count(user[0]) == 1 + any("One" in str(value) for value in fields.values())
    assert branches[0] > 50


def test_without_a_system_prompt_others_branch_off_at_the_start_and_at_the_last_question(converter: Converter) -> None:
    assert prepare(converter, CHAT).branches == [2]
    turns = [*HISTORY, *HISTORY, *HISTORY[:1]]
    made = prepared(converter, CHAT, json.dumps({"model": "tiny", "messages": turns}).encode())
    (user,) = converter.tokenizer.encode("<｜User｜>")
    first, _, last = np.flatnonzero(np.frombuffer(made.prompt, dtype="<u4") == user) + 1
    assert made.branches == [first, last] == [2, last]


def test_a_tokenizer_without_control_tokens_is_refused(tmp_path: Path) -> None:
    card = make_card(tmp_path)
    text = card.tokenizer_path.read_text()
    card.tokenizer_path.write_text(text.replace("<｜User｜>", "<｜Loser｜>"))
    with pytest.raises(CardError, match="User"):
        Converter(card)


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


@pytest.mark.parametrize("protocol", GENERATING)
def test_tokens_are_cut_off(converter: Converter, protocol: Protocol) -> None:
    cut = prepare(converter, protocol, top_k=40, min_p=0.05).sampling
    assert (cut.top_k, cut.min_p) == (40, 0.05)
    none = prepare(converter, protocol, top_k=-1, min_p=0).sampling
    assert none == prepare(converter, protocol).sampling and (none.top_k, none.min_p) == (0, 0.0)


def test_tokens_are_biased_by_their_ids(converter: Converter) -> None:
    biased = prepare(converter, CHAT, logit_bias={"1023": -100, "7": 2.5}).sampling
    assert biased.logit_bias == ((7, 2.5), (1023, -100.0))
    assert prepare(converter, CHAT, logit_bias={}).sampling == prepare(converter, CHAT).sampling
    unknown = refused(converter, CHAT, json.dumps(body(CHAT, logit_bias={"99999": 1})).encode())
    assert (unknown.code, unknown.field) == (Code.BAD_REQUEST, "logit_bias")


@pytest.mark.parametrize("protocol", GENERATING)
def test_the_least_an_answer_has(converter: Converter, protocol: Protocol) -> None:
    most = "max_output_tokens" if protocol is RESPONSES else "max_tokens"
    assert prepare(converter, protocol).min_tokens == 0
    assert prepare(converter, protocol, min_tokens=9, **{most: 9}).min_tokens == 9
    assert prepare(converter, protocol, ignore_eos=True, min_tokens=2, **{most: 9}).min_tokens == 9
    least = prepare(converter, protocol, min_tokens=3)
    assert least.submission(Call(1, "g", protocol, Payload()), "rc", "").message(Payload()).limits.min_tokens == 3
    free = prepare(converter, protocol, ignore_eos=True)
    assert free.min_tokens == free.max_tokens > 1000
    few = refused(converter, protocol, json.dumps(body(protocol, min_tokens=10, **{most: 9})).encode())
    assert (few.code, few.field) == (Code.BAD_REQUEST, "min_tokens")


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
    raw = json.dumps(body(MESSAGES, "word " * 420_000)).encode()
    http_status, error = answer(converter, Protocol.COUNT_TOKENS, raw)
    assert http_status == 400 and "at least" in error["error"]["message"]


def test_a_converter_is_loaded_once(card: ModelCard) -> None:
    assert load_converter(card) is load_converter(card)


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
        prepared(converter, protocol, raw)
    except Refusal as refusal:
        assert refusal.failure.code is not Code.INTERNAL


# Calls without generation


def answer(converter: Converter, protocol: Protocol, raw: bytes) -> tuple[int, dict[str, Any]]:
    try:
        is_models = protocol is Protocol.MODELS
        done = converter.models(raw) if is_models else converter.count(converter.read(protocol, raw), [])
    except Refusal as refusal:
        return status(refusal.failure), json.loads(error_body(protocol, refusal.failure, ""))
    return 200, json.loads(done)


def test_count_tokens(converter: Converter) -> None:
    raw = json.dumps(body(MESSAGES)).encode()
    expected = prepared(converter, MESSAGES, raw).num_prompt_tokens
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
    with pytest.raises(CardError, match="image_token_id is missing"):
        ModelCard.from_folder(tmp_path)
    assert make_card(tmp_path, image_token=IMAGE_TOKEN).has_vision
    (tmp_path / "shoal.json").unlink()
    assert ModelCard.from_folder(tmp_path).name == tmp_path.name


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_card_of_a_broken_folder(tmp_path: Path, name: str) -> None:
    make_card(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CardError, match=name):
        ModelCard.from_folder(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(CardError, match=name):
        ModelCard.from_folder(tmp_path)


def test_card_of_a_broken_tokenizer(tmp_path: Path) -> None:
    card = make_card(tmp_path)
    (tmp_path / "tokenizer.json").write_text("garbage")
    with pytest.raises(CardError, match=r"tokenizer\.json: not a tokenizer: "):
        Converter(card)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"text_config": {"max_position_embeddings": true}}'])
def test_card_of_a_broken_config(tmp_path: Path, text: str) -> None:
    make_card(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CardError, match=r"config\.json"):
        ModelCard.from_folder(tmp_path)


def test_card_of_a_hub_name() -> None:
    with pytest.raises(CardError, match="download the checkpoint"):
        ModelCard.from_folder("deepseek-ai/DeepSeek-V4.1-Flash")
