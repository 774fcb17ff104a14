"""The field table: complete, printed, and what it says is what happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.recipe.card import ModelCard
from actors.recipe.fields import FIELDS, Field, Refusal, Use, check
from actors.recipe.normalise import Normal, normalise, parse
from schemas.api import Protocol
from schemas.failure import Code

README = Path(__file__).parents[2] / "actors" / "recipe" / "README.md"
PROTOCOLS = {
    "Chat Completions": Protocol.CHAT_COMPLETIONS,
    "Responses": Protocol.RESPONSES,
    "Messages": Protocol.MESSAGES,
}
CARD = ModelCard(names=("shoal-tiny", "tiny"), context_tokens=2048, tokenizer_path=Path("none"), eos_token=1)
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> Normal:
    return normalise(Protocol.CHAT_COMPLETIONS, {"model": "tiny", "messages": MESSAGES, **fields}, CARD)


def responses(**fields: Any) -> Normal:
    return normalise(Protocol.RESPONSES, {"model": "tiny", "input": "Hi", **fields}, CARD)


def messages(**fields: Any) -> Normal:
    return normalise(Protocol.MESSAGES, {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, **fields}, CARD)


def row(name: str, field: Field) -> str:
    neutral = f"unless {', '.join(f'`{value!r}`' for value in field.neutral)}" if field.neutral else ""
    note = "; ".join(filter(None, [neutral, field.note]))
    return f"| `{name}` | {field.use} | {note} |"


def table(protocol: Protocol) -> str:
    rows = [row(name, field) for name, field in FIELDS[protocol].items()]
    return "\n".join(["| field | use | note |", "|---|---|---|", *rows])


@pytest.mark.parametrize("title", PROTOCOLS)
def test_readme_prints_the_table(title: str) -> None:
    expected = f"### {title}\n\n{table(PROTOCOLS[title])}\n"
    assert expected in README.read_text(), f"put this into {README.name}:\n\n{expected}"


@pytest.mark.parametrize("protocol", PROTOCOLS.values())
def test_every_refused_field_is_refused_by_name_unless_neutral(protocol: Protocol) -> None:
    for name, field in FIELDS[protocol].items():
        if field.use is not Use.REFUSED or "." in name:
            continue
        with pytest.raises(Refusal) as refused:
            check(protocol, {name: "anything"})
        assert refused.value.failure.code is Code.UNSUPPORTED
        assert refused.value.failure.field == name
        assert name in refused.value.failure.message
        for neutral in (None, *field.neutral):
            assert check(protocol, {name: neutral}) == ({}, [])


@pytest.mark.parametrize("protocol", PROTOCOLS.values())
def test_ignored_fields_are_listed_and_dropped(protocol: Protocol) -> None:
    for name, field in FIELDS[protocol].items():
        if field.use is Use.IGNORED and "." not in name:
            assert check(protocol, {name: "x"}) == ({}, [name])
            assert check(protocol, {name: None}) == ({}, [])


@pytest.mark.parametrize("name", ["foo", "tools[].strict", "text.verbosity", "best_of"])
def test_unknown_fields_are_refused(name: str) -> None:
    for protocol in PROTOCOLS.values():
        with pytest.raises(Refusal) as refused:
            check(protocol, {name: 1})
        assert refused.value.failure.code is Code.BAD_REQUEST
        assert refused.value.failure.field == name


def test_true_is_not_the_number_one() -> None:
    with pytest.raises(Refusal):
        check(Protocol.CHAT_COMPLETIONS, {"n": True})
    assert check(Protocol.CHAT_COMPLETIONS, {"n": 1, "frequency_penalty": 0.0}) == ({}, [])


def test_the_sdks_enums_of_fields_are_all_known() -> None:
    """Whatever the SDKs can send has a row."""
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase as Messages
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

    assert set(Chat.__annotations__) <= set(FIELDS[Protocol.CHAT_COMPLETIONS])
    assert set(Responses.__annotations__) <= set(FIELDS[Protocol.RESPONSES])
    assert set(Messages.__annotations__) <= set(FIELDS[Protocol.MESSAGES])


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not JSON"),
        (b'{"model": "tiny", "mess', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "list"),
        (b'"x"', "str"),
        (b"null", "NoneType"),
    ],
)
def test_bodies_that_are_no_json_objects(body: bytes, part: str) -> None:
    with pytest.raises(Refusal, match=part) as refused:
        parse(body)
    assert refused.value.failure.code is Code.BAD_REQUEST


@pytest.mark.parametrize("model", [None, 7, "", ["tiny"]])
def test_model_must_be_a_name(model: Any) -> None:
    with pytest.raises(Refusal) as refused:
        normalise(Protocol.CHAT_COMPLETIONS, {"model": model, "messages": MESSAGES}, CARD)
    assert (refused.value.failure.code, refused.value.failure.field) == (Code.BAD_REQUEST, "model")


def test_models_served_and_not() -> None:
    assert chat().model == "tiny"
    assert chat(model="shoal-tiny").model == "shoal-tiny"
    with pytest.raises(Refusal) as refused:
        chat(model="gpt-4")
    assert refused.value.failure.code is Code.MODEL_NOT_FOUND


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=7).body["max_tokens"] == 7
    assert chat(max_completion_tokens=7, max_tokens=7).body["max_tokens"] == 7
    with pytest.raises(Refusal, match="differ"):
        chat(max_completion_tokens=7, max_tokens=8)


def test_the_developer_is_the_system() -> None:
    body = chat(messages=[{"role": "developer", "content": "x"}, *MESSAGES]).body
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


def test_an_empty_list_of_calls_is_none() -> None:
    turn = {"role": "assistant", "content": "a", "tool_calls": []}
    assert "tool_calls" not in chat(messages=[*MESSAGES, turn]).body["messages"][1]
    assert turn["tool_calls"] == []  # the client's own body is not touched


def test_explicit_sampling_is_kept() -> None:
    choice = chat(temperature=0, top_p=0.5, seed=3).choice
    assert (choice.temperature, choice.top_p, choice.seed) == (0.0, 0.5, 3)
    assert chat().choice.temperature is None


@pytest.mark.parametrize("fields", [{"temperature": "hot"}, {"temperature": True}, {"top_p": []}])
def test_sampling_must_be_numbers(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        chat(**fields)
    assert refused.value.failure.field in fields


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", True])
def test_seeds_out_of_range(seed: Any) -> None:
    for make in (chat, responses, messages):
        with pytest.raises(Refusal) as refused:
            make(seed=seed)
        assert refused.value.failure.field == "seed"


def test_choices_of_tools_that_there_are_not() -> None:
    for make in (chat, responses, messages):
        for choice in ({"type": "allowed_tools"}, "sometimes", 7):
            with pytest.raises(Refusal) as refused:
                make(tool_choice=choice)
            assert (refused.value.failure.code, refused.value.failure.field) == (Code.UNSUPPORTED, "tool_choice")
    with pytest.raises(Refusal, match="disable_parallel_tool_use must be true or false"):
        messages(tool_choice={"type": "auto", "disable_parallel_tool_use": 1})
    for make in (chat, responses):
        with pytest.raises(Refusal, match="parallel_tool_calls must be true or false"):
            make(parallel_tool_calls="no")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_content_that_would_be_dropped_is_refused() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (chat, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}),
        (chat, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
        (chat, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}]}),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        (responses, {"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]}),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (messages, {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}),
        (
            messages,
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        ),
        (responses, {"tools": [{"type": "web_search"}]}),
    ]
    for make, fields in cases:
        with pytest.raises(Refusal) as refused:
            make(**fields)
        assert refused.value.failure.code is Code.UNSUPPORTED, fields


def test_images_say_that_the_checkpoint_is_text_only() -> None:
    with pytest.raises(Refusal, match="text-only checkpoint"):
        chat(messages=[{"role": "user", "content": [IMAGE]}])


def test_what_is_ignored_inside() -> None:
    normal = chat(
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[{"role": "user", "content": "x", "name": "bob"}],
        user="u",
    )
    assert normal.ignored == ["messages[].name", "thinking.budget_tokens", "user"]


def test_what_is_said_right_inside_a_field_has_rows_too() -> None:
    assert chat(stream_options={"include_usage": True, "include_obfuscation": True}).ignored == [
        "stream_options.include_obfuscation"
    ]
    assert responses(reasoning={"effort": "low", "summary": "auto"}).ignored == ["reasoning.summary"]
    assert messages(thinking={"type": "adaptive", "display": "omitted"}).ignored == ["thinking.display"]
    with pytest.raises(Refusal, match="text.verbosity"):
        responses(text={"verbosity": "low"})
    assert responses(text={"verbosity": "medium"}, reasoning={"summary": None}).ignored == []


LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    ("make", "fields", "num_top"),
    [
        (chat, {}, -1),
        (chat, {"logprobs": False, "top_logprobs": 0}, -1),
        (chat, {"logprobs": True}, 0),
        (chat, {"logprobs": True, "top_logprobs": 20}, 20),
        (responses, {"top_logprobs": 0}, -1),
        (responses, {"top_logprobs": 3}, 3),
        (responses, {"include": [LOGPROBS]}, 0),
        (responses, {"include": [LOGPROBS], "top_logprobs": 3}, 3),
        (messages, {}, -1),
    ],
)
def test_logprobs_are_asked_for(make: Callable[..., Normal], fields: dict[str, Any], num_top: int) -> None:
    normal = make(**fields)
    assert (normal.choice.top_logprobs, normal.ignored) == (num_top, [])
    assert "include" not in normal.body


def test_what_else_is_to_be_included_is_ignored() -> None:
    for include in (["reasoning.encrypted_content"], "all", [LOGPROBS, "web_search_call.results"]):
        assert responses(include=include).ignored == ["include"]


@pytest.mark.parametrize(
    ("make", "fields", "name"),
    [
        (chat, {"logprobs": 1}, "logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (responses, {"top_logprobs": -1}, "top_logprobs"),
        (responses, {"top_logprobs": True}, "top_logprobs"),
        (messages, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"min_tokens": -1}, "min_tokens"),
        (responses, {"min_tokens": 1.0}, "min_tokens"),
        (messages, {"ignore_eos": 1}, "ignore_eos"),
        (chat, {"top_k": -2}, "top_k"),
        (messages, {"top_k": 1.5}, "top_k"),
        (responses, {"min_p": 1.5}, "min_p"),
        (chat, {"min_p": "0.5"}, "min_p"),
        (chat, {"logit_bias": [7]}, "logit_bias"),
        (chat, {"logit_bias": {"seven": 1}}, "logit_bias"),
        (chat, {"logit_bias": {"-7": 1}}, "logit_bias"),
        (chat, {"logit_bias": {"7": 100.5}}, "logit_bias"),
        (chat, {"logit_bias": {"7": 1, "07": 1}}, "logit_bias"),
        (chat, {"logit_bias": {"7": True}}, "logit_bias"),
        (chat, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
def test_sampling_out_of_range(make: Callable[..., Normal], fields: dict[str, Any], name: str) -> None:
    with pytest.raises(Refusal) as refused:
        make(**fields)
    assert (refused.value.failure.code, refused.value.failure.field) == (Code.BAD_REQUEST, name)


def test_a_custom_client_tool_of_anthropic_is_a_client_tool() -> None:
    tool = {"type": "custom", "name": "f", "input_schema": {"type": "object"}}
    assert messages(tools=[tool]).body["tools"] == [{"name": "f", "input_schema": {"type": "object"}}]
